// bipolarGemmFused: y[M, N] = x W^T + bias for bipolar-INT operands, planes of W turned into codes in registers:
// gemm_fused.cuh (Bipolar-INT sections 3.2, 4.1).
#include "gemm_items.cuh"

// The products of a slot's 1024 columns, or of the fewer lines that K has left.
template <class S, int kStages, int kSlots>
__device__ __forceinline__ void multiplyStretch(int* acc, StagesOfX<S, kStages>& x, SlotsOfW<S, kSlots>& w,
                                                const Turns<S>& turns, int count) {
    if (count < kChunksPerLine) {
#pragma unroll 1
        for (int line = 0; line < count; ++line) {
            uint32 codes[kSteps][4];
            expandLine<S>(w.slot(), w.row, line, w.g, codes);
            const uint32 from = x.line(line);
            turns.wait();
            productFence();
            multiplyLine<S>(acc, codes, from);
            productCommit();
            turns.handOn();
            x.finish(line, count);
        }
        w.next();
        return;
    }
    GroupCodes<S> second;
#pragma unroll
    for (int group = 0; group < S::kGroups; ++group) {
        const int line = group * S::kGroupLines;
        const GroupCodes<S>& own = group % 2 ? second : w.first;
        const uint32 from = x.line(line);
        turns.wait();
        productFence();
#pragma unroll
        for (int i = 0; i < S::kGroupLines; ++i) multiplyLine<S>(acc, own.codes[i], from + i * S::kTokenBytes);
        productCommit();
        turns.handOn();
        if (group + 1 == S::kGroups) w.next();  // while these products run
        else (group % 2 ? w.first : second).expand(w.slot(), w.row, line + S::kGroupLines, w.g);
        x.finish(line + S::kGroupLines - 1, kChunksPerLine);
    }
}

template <int kBits, int kTokens, int kWarpgroups, int kSlots, int kStages, bool kCoded>
__global__ void __launch_bounds__((kWarpgroups + 1) * kWarpgroup, 1)
    bipolarGemmFused(const uint8* __restrict__ xTiles, const uint8* __restrict__ wTiles,    // bytes of x, planes of W
                     const int* xSums, const int* __restrict__ wSums,  // [M] or [2, M], written until the wait; [N]
                     const float* xSteps, const uint16* __restrict__ wScales,  // [M] fp32, written until the wait; [N] fp16
                     const uint8* __restrict__ scaleTiles,                                  // scales.cuh, or null
                     const void* __restrict__ bias,                                         // [N] of y's type, or null
                     uint8* __restrict__ y,                                                 // [M, N]
                     uint32* partials, uint32* ready,                                       // SharedItem
                     int M, int N, int K, int actLimit, int weightLimit,
                     int zero, int dtype,  // whether tokens have zero points; of y
                     int rowTiles, int tokenTiles, int tokenBand, int wholeItems, int splits) {
    using S = FusedShape<kBits, kTokens, kWarpgroups, kCoded>;
    using Line = LineOf<true>;  // without zero points every token's is 1, see twiceZero
    extern __shared__ uint8 dynamicShared[];
    __shared__ Line lines[kLineSets][S::kRows + kTokens];  // of features, of tokens
    const FusedProblem p{xTiles, wTiles, scaleTiles, partials, ready, M, N, K, rowTiles, tokenTiles, tokenBand, wholeItems, splits};
    const LineProblem ofLines{xSums, wSums, xSteps, wScales, bias, M, N, K, Widths{zero ? 1 : actLimit, weightLimit}, zero != 0};

    const auto load = [&](int set, const FusedPlace& place, int thread) {
        loadLines<false, kTokens, S::kRows, kLineThreads, true>(ofLines, lines[set] + S::kRows, lines[set], place.token,
                                                                place.block * kBlockRows, thread, dtype);
    };
    const auto multiply = [&](int* sums, auto& x, auto& w, const Turns<S>& turns, const Segment& segment) {
#pragma unroll 1
        for (int k = segment.firstTile; k < segment.firstTile + segment.tiles; ++k) {
            multiplyStretch(sums, x, w, turns, min(kChunksPerLine, p.lines() - k * kChunksPerLine));
        }
#pragma unroll
        for (int i = S::kSums; i < S::kSets * S::kSums; ++i) sums[i - S::kSums] += sums[i];
    };
    const auto write = [&](const int* sums, int set, const FusedPlace& place, bool split, int warpgroup, int thread) {
        const int row = warpgroup * kBlockRows + thread / kWarpSize * 16 + thread % kWarpSize / 4;
        const Line* const tokens = lines[set] + S::kRows;
        const Line features[2] = {lines[set][row], lines[set][row + 8]};
        const Place to{y, place.token, place.block * kBlockRows, M, N};
        writeItem<S>(sums, to, split, thread, dtype, [&](int sum, int half, int token) {
            const Line ofToken = tokens[token], &feature = features[half];
            return scaled(valueOf<false>(integerOf<true, true>(sum, feature, ofToken)), feature.scale, ofToken.scale, feature.bias);
        });
    };
    runItems<S, kSlots, kStages>(p, dynamicShared, load, multiply, write);
}
