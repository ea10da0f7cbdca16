// The items of gemm_fused.cu: a block's warps, what they do with an item, and its epilogue.
#pragma once
#include "gemm_fused.cuh"

constexpr int kLaneFeatures = 4;  // neighbouring features that a pair of lanes has of a token
// What comes next often has a block a token. Allowed to begin before its items end, few of these find room on the
// multiprocessors that have no item; more crowd there, and take longer than they gain.
constexpr int kFewTokens = 8;

// kLaneFeatures values of a token from feature n on, to y: of 16 bits in two words, or of 32.
template <class Word, int kWords>
__device__ __forceinline__ void storeFeatures(const Word (&words)[kWords], const Place& p, int m, int n) {
    constexpr int kElement = kWords * sizeof(Word) / kLaneFeatures;
    if (m >= p.M) return;
    uint8* to = p.y + (size_t(m) * p.N + n) * kElement;
    if (p.N % kLaneFeatures == 0) {  // then feature + kLaneFeatures <= N, or none is inside
        if (n >= p.N) return;
        if constexpr (kWords == 2) *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
        else *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
        return;
    }
#pragma unroll
    for (int i = 0; i < kLaneFeatures; ++i) {
        if (n + i >= p.N) return;
        if constexpr (kWords == 2) reinterpret_cast<uint16*>(to)[i] = uint16(words[i / 2] >> i % 2 * 16);
        else reinterpret_cast<uint32*>(to)[i] = words[i];
    }
}

// A warpgroup's sums -> y. valueOf(sum, half, token): the value of a sum of row g, or g + 8 for half 1, and a token of the
// tile. split: whether the block finishes half of the tokens. A lane has two features each of tokens 2 t and 2 t + 1, and the lane of row g ^ 1 those between: one of them takes
// one token, the other the other.
template <class S, class ValueOf>
__device__ __forceinline__ void writeItem(const int* sums, const Place& p, bool split, int thread, int dtype,
                                          const ValueOf& valueOf) {
    constexpr int kOther = 4;  // lanes from row g to g ^ 1
    const int lane = thread % kWarpSize, row = thread / kWarpSize * 16 + lane / 4;
    const bool odd = row % 2 != 0;
    const int n = p.n + featureOfRow(row & ~1);
    const uint32 lower = odd ? 0x1054 : 0x5410, upper = odd ? 0x3276 : 0x7632;  // halves of own and the other's word
#pragma unroll
    for (int j = 0; j < S::kTokens / 8; ++j) {
        if (p.m + 8 * j >= p.M) return;
        if (split && !S::Splits::finishes(j)) continue;
        const int first = 8 * j + lane % 4 * 2, m = p.m + first + odd;
        float value[2][2];  // of a token, of a half
#pragma unroll
        for (int i = 0; i < 4; ++i) value[i % 2][i / 2] = valueOf(sums[4 * j + i], i / 2, first + i % 2);
        if (dtype == kFloat32) {
            float own[2], other[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                own[half] = odd ? value[1][half] : value[0][half];
                other[half] = __shfl_xor_sync(kFullWarp, odd ? value[0][half] : value[1][half], kOther);
            }
            uint32 words[kLaneFeatures];
#pragma unroll
            for (int i = 0; i < kLaneFeatures; ++i) words[i] = __float_as_uint((i % 2 != 0) == odd ? own[i / 2] : other[i / 2]);
            storeFeatures(words, p, m, n);
            continue;
        }
        uint32 pair[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            pair[i] = floatToShort(value[i][0], dtype) | uint32(floatToShort(value[i][1], dtype)) << 16;
        }
        const uint32 own = odd ? pair[1] : pair[0], other = __shfl_xor_sync(kFullWarp, odd ? pair[0] : pair[1], kOther);
        const uint32 words[2] = {selectBytes(own, other, lower), selectBytes(own, other, upper)};
        storeFeatures(words, p, m, n);
    }
}

// The kernel, once a block's warps know their parts. Its items' sums are S::kSums in every consumer thread.
//
//   loadLines(set, place, thread)        by kLineThreads threads: what the epilogue needs of an item's rows
//   multiply(sums, x, w, turns, segment) by a consumer: adds a segment's products
//   write(sums, set, place, split, warpgroup, thread)  by a consumer: an item's sums to y
template <class S, int kSlots, int kStages, class LoadLines, class Multiply, class Write>
__device__ __forceinline__ void runItems(const FusedProblem& p, uint8* dynamicShared, const LoadLines& loadLines,
                                         const Multiply& multiply, const Write& write) {
    constexpr int kWarpgroups = S::kWarpgroups;
    __shared__ uint64 slotsFull[kSlots], slotsEmpty[kSlots], stagesFull[kStages], stagesEmpty[kStages], linesFull[kLineSets];
    __shared__ FusedPlace places[kLineSets];  // of the items that the lines are of
    __shared__ Mailbox mailbox;
    const uint32 stages = (sharedAddress(dynamicShared) + kSharedAlignment - 1) & ~uint32(kSharedAlignment - 1);
    const uint32 slots = stages + kStages * kStageBytes, received = slots + kSlots * S::kSlotBytes;
    const bool split = S::kSplits && p.splits > 1;

    const int thread = threadIdx.x % kWarpgroup, lane = threadIdx.x % kWarpSize;
    const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / kWarpgroup, 0);  // the same for all, as ptxas sees it too
    if (lane == 0) {  // of every warp: one thread would take 60 cycles for each
        constexpr int kWarps = (kWarpgroups + 1) * kWarpsOfGroup;
        const int warp = threadIdx.x / kWarpSize;
        for (int i = warp; i < kSlots; i += kWarps) barrierInit(&slotsFull[i], 1), barrierInit(&slotsEmpty[i], kWarpsOfGroup);
        for (int i = warp; i < kStages; i += kWarps) barrierInit(&stagesFull[i], 1), barrierInit(&stagesEmpty[i], kWarpgroups);
        for (int i = warp; i < kLineSets; i += kWarps) barrierInit(&linesFull[i], kLineThreads);
        if (split && warp == 0) mailbox.prepare();
        barrierInitFence();
    }
    if (split) mailbox.arrive();
    __syncthreads();
    if (p.M <= kFewTokens) allowNextKernel();
    constexpr int kLineUsers = kLineThreads + S::kConsumers, kLinesBarrier = 1;
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
                const FusedPlace place = fusedPlace<S>(p, work.segment(p, index).item);
                loadLines(set, place, thread - kLineThreads);
                if (thread == kLineThreads) places[set] = place;
                barrierArrive(&linesFull[set]);
            }
        }
        __syncwarp();
        if (split) mailbox.waitForOthers();
    } else {
        if constexpr (kWarpgroups == 2) takeRegisters<kConsumerRegisters>();
        const uint32 row = (thread / kWarpSize * 16 + lane / 4) * kLineBytes + lane % 4 * sizeof(uint32);
        SlotsOfW<S, kSlots> w{slots, row, slotsFull, slotsEmpty, lane / 4, typename S::Work(p).allTiles(), {warpgroup, 0}};
        StagesOfX<S, kStages> x{stages, stagesFull, stagesEmpty, thread == 0};
        const Turns<S> turns{warpgroup};
        w.begin();
        turns.begin();
#pragma unroll 1
        for (int index = 0;; ++index) {
            const typename S::Work work(p);
            if (index >= work.segments) break;
            const Segment segment = work.segment(p, index);
            int sums[S::kSets * S::kSums] = {};
            multiply(sums, x, w, turns, segment);
            if (index + 1 >= work.segments) allowNextKernel();
            if (index == 0) waitForPriorKernels();  // which may read y or use the partials' memory
            if constexpr (S::kSplits) {
                if (split) S::Splits::exchange(sums, mailbox, received);
            }
            const SharedItem<S> shared(p, work, segment.item);
            const int set = index % kLineSets;
            if (work.block > shared.first) {
                shared.leave(sums, p, work);
            } else {
                if (shared.last > shared.first) shared.collect(sums, p, work);
                barrierWait(&linesFull[set], index / kLineSets % 2);
                const FusedPlace place = places[set];
                write(sums, set, FusedPlace{place.block + warpgroup, place.token}, split, warpgroup, thread);
            }
            if (index + kLineSets < work.segments) namedArrive(kLinesBarrier + set, kLineUsers);
        }
        turns.end();
    }
}
