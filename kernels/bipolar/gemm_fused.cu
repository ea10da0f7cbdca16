// bipolarGemmFused: y[M, N] = x W^T + bias for bipolar-INT operands, planes of W turned into codes in registers:
// gemm_fused.cuh (Bipolar-INT sections 3.2, 4.1).
#include "gemm_fused.cuh"

// One token's values of kRunFeatures features from n on. sums: of these, in a slab.
__device__ __forceinline__ void writeRun(const int* sums, const LineOf<true>* features, const LineOf<true>& token, int first,
                                         const Place& p, int m, int n, int dtype) {
    float value[kRunFeatures];
#pragma unroll
    for (int i = 0; i < kRunFeatures; ++i) {
        const LineOf<true> feature = features[featureOfRow(first + i)];
        const int v = integerOf<true, true>(sums[i], feature, token);
        value[i] = scaled(valueOf<false>(v), feature.scale, token.scale, feature.bias);
    }
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

// A warpgroup's sums -> y, 32 tokens at a time through a slab [token][feature].
template <int kTokens>
__device__ __forceinline__ void writeItem(const int* sums, const LineOf<true>* features, const LineOf<true>* tokens,
                                          const Place& p, int* slab, int thread, int barrier, int dtype) {
    constexpr int kRuns = kBlockRows / kRunFeatures, kPass = kWarpgroup / kRuns;
    const int lane = thread % kWarpSize, t = lane % 4, row = thread / kWarpSize * 16 + lane / 4;
    const int first = thread % kRuns * kRunFeatures;
#pragma unroll
    for (int start = 0; start < kTokens; start += kSlabTokens) {
        if (p.m + start >= p.M) return;
        namedSync(barrier, kWarpgroup);  // all have read the slab before
#pragma unroll
        for (int i = 0; i < kSlabTokens / 4; ++i) {
            int* to = slab + (i / 2 * 8 + 2 * t + i % 2) * kSlabRow;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                to[featureOfRow(row + 8 * half)] = sums[(start / 8 + i / 2) * 4 + 2 * half + i % 2];
            }
        }
        namedSync(barrier, kWarpgroup);
#pragma unroll 1
        for (int token = thread / kRuns; token < kSlabTokens; token += kPass) {
            if (p.m + start + token >= p.M || p.n + first >= p.N) continue;
            writeRun(slab + token * kSlabRow + first, features, tokens[start + token], first, p, p.m + start + token,
                     p.n + first, dtype);
        }
    }
}

template <int kBits, int kTokens, int kWarpgroups, int kSlots, int kStages>
__global__ void __launch_bounds__((kWarpgroups + 1) * kWarpgroup, 1)
    bipolarGemmFused(const uint8* __restrict__ xTiles, const uint8* __restrict__ wTiles,    // bytes of x, planes of W
                     const int* xSums, const int* __restrict__ wSums,  // [M] or [2, M], written until the wait; [N]
                     const float* xSteps, const uint16* __restrict__ wScales,  // [M] fp32, written until the wait; [N] fp16
                     const void* __restrict__ bias,                                         // [N] of y's type, or null
                     uint8* __restrict__ y,                                                 // [M, N]
                     uint32* partials, uint32* ready,                                       // SharedItem
                     int M, int N, int K, int actLimit, int weightLimit,
                     int zero, int dtype,  // whether tokens have zero points; of y
                     int rowTiles, int tokenTiles, int tokenBand, int wholeItems) {
    using S = FusedShape<kBits, kTokens, kWarpgroups>;
    using Line = LineOf<true>;  // without zero points every token's is 1, see twiceZero
    extern __shared__ uint8 dynamicShared[];
    __shared__ uint64 slotsFull[kSlots], slotsEmpty[kSlots], stagesFull[kStages], stagesEmpty[kStages], linesFull[kLineSets];
    __shared__ Line lines[kLineSets][S::kRows + kTokens];  // of features, of tokens
    const uint32 slots = (sharedAddress(dynamicShared) + kSharedAlignment - 1) & ~uint32(kSharedAlignment - 1);
    const uint32 stages = slots + kSlots * S::kSlotBytes, slabs = stages + kStages * kStageBytes;
    const FusedProblem p{xTiles, wTiles, partials, ready, M, N, K, rowTiles, tokenTiles, tokenBand, wholeItems};

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
            const Widths widths{zero ? 1 : actLimit, weightLimit};
            const LineProblem problem{xSums, wSums, xSteps, wScales, bias, M, N, K, widths, zero != 0};
            const typename S::Work work(p);
            for (int index = 0; index < work.segments; ++index) {
                const FusedPlace place = fusedPlace<S>(p, work.segment(p, index).item);
                const int set = index % kLineSets;
                if (index >= kLineSets) namedSync(kLinesBarrier + set, kLineUsers);  // asleep
                loadLines<false, kTokens, S::kRows, kLineThreads, true>(problem, lines[set] + S::kRows, lines[set], place.token,
                                                                        place.block * kBlockRows, thread - kLineThreads, dtype);
                barrierArrive(&linesFull[set]);
            }
        }
    } else {
        if constexpr (kWarpgroups == 2) takeRegisters<kConsumerRegisters>();
        const uint32 row = (thread / kWarpSize * 16 + lane / 4) * kLineBytes + lane % 4 * sizeof(uint32);
        SlotsOfW<S, kSlots> w{slots, row, slotsFull, slotsEmpty, lane / 4, typename S::Work(p).allTiles(), {warpgroup, 0}};
        StagesOfX<S, kStages> x{stages, stagesFull, stagesEmpty, thread == 0};
        w.begin();
#pragma unroll 1
        for (int index = 0;; ++index) {
            const typename S::Work work(p);
            if (index >= work.segments) break;
            const Segment segment = work.segment(p, index);
            int acc[S::kSets * S::kSums] = {};
#pragma unroll 1
            for (int k = segment.firstTile; k < segment.firstTile + segment.tiles; ++k) {
                multiplyStretch(acc, x, w, min(kChunksPerLine, p.lines() - k * kChunksPerLine));
            }
#pragma unroll
            for (int i = S::kSums; i < S::kSets * S::kSums; ++i) acc[i - S::kSums] += acc[i];
            if (index == 0) waitForPriorKernels();  // which may read y or use the partials' memory
            const SharedItem<S> shared(p, work, segment.item);
            const int set = index % kLineSets;
            if (work.block > shared.first) {
                shared.leave(acc, p, work);
            } else {
                if (shared.last > shared.first) shared.collect(acc, p, work);
                const FusedPlace place = fusedPlace<S>(p, segment.item);
                barrierWait(&linesFull[set], index / kLineSets % 2);
                int* const slab = reinterpret_cast<int*>(dynamicShared + (slabs - sharedAddress(dynamicShared)));
                writeItem<kTokens>(acc, lines[set] + warpgroup * kBlockRows, lines[set] + S::kRows,
                                   Place{y, place.token, (place.block + warpgroup) * kBlockRows, M, N},
                                   slab + warpgroup * kSlabIntegers, thread, warpgroup + 1, dtype);
            }
            if (index + kLineSets < work.segments) namedArrive(kLinesBarrier + set, kLineUsers);
        }
    }
}
