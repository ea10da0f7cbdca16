// The items of gemm_fused.cu and gemm_grouped.cu: a block's warps, what they do with an item, and its epilogue.
#pragma once
#include "gemm_fused.cuh"

// A warpgroup's sums -> y, 32 tokens at a time through a slab [token][feature]. writeRun(sums, first, token, m, n): one
// token's values of kRunFeatures features from n on, which are the tile's from `first` on; token: of the tile.
template <int kTokens, class Sum, class WriteRun>
__device__ __forceinline__ void writeItem(const Sum* sums, const Place& p, Sum* slab, int thread, int barrier,
                                          const WriteRun& writeRun) {
    constexpr int kRuns = kBlockRows / kRunFeatures, kPass = kWarpgroup / kRuns;
    const int lane = thread % kWarpSize, t = lane % 4, row = thread / kWarpSize * 16 + lane / 4;
    const int first = thread % kRuns * kRunFeatures;
#pragma unroll
    for (int start = 0; start < kTokens; start += kSlabTokens) {
        if (p.m + start >= p.M) return;
        namedSync(barrier, kWarpgroup);  // all have read the slab before
#pragma unroll
        for (int i = 0; i < kSlabTokens / 4; ++i) {
            Sum* to = slab + (i / 2 * 8 + 2 * t + i % 2) * kSlabRow;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                to[featureOfRow(row + 8 * half)] = sums[(start / 8 + i / 2) * 4 + 2 * half + i % 2];
            }
        }
        namedSync(barrier, kWarpgroup);
#pragma unroll 1
        for (int token = thread / kRuns; token < kSlabTokens; token += kPass) {
            if (p.m + start + token >= p.M || p.n + first >= p.N) continue;
            writeRun(slab + token * kSlabRow + first, first, start + token, p.m + start + token, p.n + first);
        }
    }
}

// kRunFeatures values of token m from feature n on, to y.
__device__ __forceinline__ void storeFeatures(const float (&value)[kRunFeatures], const Place& p, int m, int n, int dtype) {
    const size_t index = size_t(m) * p.N + n;
    if (p.N % kRunFeatures == 0 && dtype != kFloat32) {
        uint32 word[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            word[i] = floatToShort(value[2 * i], dtype) | uint32(floatToShort(value[2 * i + 1], dtype)) << 16;
        }
        *reinterpret_cast<uint4*>(p.y + index * 2) = make_uint4(word[0], word[1], word[2], word[3]);
    } else {
#pragma unroll
        for (int i = 0; i < kRunFeatures; ++i) {
            if (n + i < p.N) storeElement(p.y, index + i, value[i], dtype);
        }
    }
}

// The kernel, once a block's warps know their parts. Its items' sums are S::kSums of type Sum in every consumer thread.
//
//   loadLines(set, place, thread)        by kLineThreads threads: what the epilogue needs of an item's rows
//   multiply(sums, x, w, turns, segment) by a consumer: adds a segment's products
//   write(sums, set, place, slab, warpgroup, thread)  by a consumer: an item's sums to y
template <class S, class Codes, class Sum, int kSlots, int kStages, class LoadLines, class Multiply, class Write>
__device__ __forceinline__ void runItems(const FusedProblem& p, uint8* dynamicShared, const LoadLines& loadLines,
                                         const Multiply& multiply, const Write& write) {
    constexpr int kWarpgroups = S::kWarpgroups;
    __shared__ uint64 slotsFull[kSlots], slotsEmpty[kSlots], stagesFull[kStages], stagesEmpty[kStages], linesFull[kLineSets];
    const uint32 slots = (sharedAddress(dynamicShared) + kSharedAlignment - 1) & ~uint32(kSharedAlignment - 1);
    const uint32 stages = slots + kSlots * S::kSlotBytes, slabs = stages + kStages * kStageBytes;

    const int thread = threadIdx.x % kWarpgroup, lane = threadIdx.x % kWarpSize;
    const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / kWarpgroup, 0);  // the same for all, as ptxas sees it too
    if (threadIdx.x == 0) {
        for (int i = 0; i < kSlots; i++) barrierInit(&slotsFull[i], 1), barrierInit(&slotsEmpty[i], kWarpsOfGroup);
        for (int i = 0; i < kStages; i++) barrierInit(&stagesFull[i], 1), barrierInit(&stagesEmpty[i], kWarpgroups);
        for (int i = 0; i < kLineSets; i++) barrierInit(&linesFull[i], kLineThreads);
        barrierInitFence();
    }
    __syncthreads();
    allowNextKernel();
    constexpr int kLineUsers = kLineThreads + S::kConsumers, kLinesBarrier = kWarpgroups + 1;
    if (warpgroup == kWarpgroups) {
        if constexpr (kWarpgroups == 2) giveRegisters<kProducerRegisters>();
        const int warp = thread / kWarpSize;
        if (warp > 0) waitForPriorKernels();  // from here on x may be read
        if (warp == 0) {
            if (electLane()) copyPlanes<S, kSlots>(p, slots, slotsFull, slotsEmpty);
        } else if (warp == 1) {
            if (electLane()) copyX<S, kStages>(p, stages, stagesFull, stagesEmpty);
        } else {
            const typename S::Work work(p);
            for (int index = 0; index < work.segments; ++index) {
                const int set = index % kLineSets;
                if (index >= kLineSets) namedSync(kLinesBarrier + set, kLineUsers);  // asleep
                loadLines(set, fusedPlace<S>(p, work.segment(p, index).item), thread - kLineThreads);
                barrierArrive(&linesFull[set]);
            }
        }
    } else {
        if constexpr (kWarpgroups == 2) takeRegisters<kConsumerRegisters>();
        const uint32 row = (thread / kWarpSize * 16 + lane / 4) * kLineBytes + lane % 4 * sizeof(uint32);
        SlotsOfW<S, Codes, kSlots> w{slots, row, slotsFull, slotsEmpty, lane / 4, typename S::Work(p).allTiles(), {warpgroup, 0}};
        StagesOfX<S, kStages> x{stages, stagesFull, stagesEmpty, thread == 0};
        const Turns<S> turns{warpgroup};
        w.begin();
        turns.begin();
#pragma unroll 1
        for (int index = 0;; ++index) {
            const typename S::Work work(p);
            if (index >= work.segments) break;
            const Segment segment = work.segment(p, index);
            Sum sums[S::kSets * S::kSums] = {};
            multiply(sums, x, w, turns, segment);
            if (index == 0) waitForPriorKernels();  // which may read y or use the partials' memory
            const SharedItem<S> shared(p, work, segment.item);
            const int set = index % kLineSets;
            if (work.block > shared.first) {
                shared.leave(sums, p, work);
            } else {
                if (shared.last > shared.first) shared.collect(sums, p, work);
                FusedPlace place = fusedPlace<S>(p, segment.item);
                place.block += warpgroup;
                barrierWait(&linesFull[set], index / kLineSets % 2);
                Sum* const slab = reinterpret_cast<Sum*>(dynamicShared + (slabs - sharedAddress(dynamicShared)));
                write(sums, set, place, slab + warpgroup * kSlabIntegers, warpgroup, thread);
            }
            if (index + kLineSets < work.segments) namedArrive(kLinesBarrier + set, kLineUsers);
        }
        turns.end();
    }
}
