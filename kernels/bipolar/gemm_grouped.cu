// bipolarGemmGrouped: y[M, N] = x W^T + bias for bipolar-INT operands whose weight has a scale per row and group of columns,
// planes of W turned into values in registers: gemm_fused.cuh (Bipolar-INT sections 3.2, 4.1).
//
//   dot[m, n, l] = sum_(k in line l) u_x[m, k] v_w[n, k]                  exact, in integers
//   y[m, n] = step[m] (2 sum_l scale[n, l] dot[m, n, l] - c[m] offset[n]) + bias[n]
//   offset[n] = sum_l scale[n, l] sum_(k in line l) v_w[n, k],  c = 2^q - 1, or twice the token's zero point
//
// v_w = 2 u_w - (2^p - 1), times 2^(7 - p), are signed bytes (SignedCodeWords), so a sum of the codes of x per group is not
// needed. Groups are whole lines of 128 columns. Two lines, of 128 tokens one, have integers of their own, which become
// floats. The next are expanded behind the products of these, which are waited for once. Sums over lines are fp32 in a fixed
// order.
//
//   scaleTiles [row block of 64][stretch][8 lines][16 w + 2 g + h] fp16: of tile row 16 w + g + 8 h; 0 behind the last line
// Limits: p < 8; a line's sum is below 128 * 255 * 127 < 2^24, exact as a float.
#include "gemm_items.cuh"

template <int kBits_, int kTokens_, int kWarpgroups_>
struct GroupedShape : FusedShape<kBits_, kTokens_, kWarpgroups_> {
    using Base = FusedShape<kBits_, kTokens_, kWarpgroups_>;
    static constexpr int kScaleBytes = kChunksPerLine * kBlockRows * sizeof(uint16);
    static constexpr int kSlotBytes = Base::kPlanesBytes + kScaleBytes;
    static constexpr int kSets = 1, kTogether = kTokens_ > 64 ? 1 : 2;  // lines whose products are waited for once
    static constexpr bool kTurns = Base::kTurns && kTokens_ <= 64;
    static_assert(Base::kStageLines % kTogether == 0, "they are in one stage");
};

// The values of a lane in lines that are multiplied together, and the scales of its rows g and g + 8.
template <class S>
struct ScaledLines {
    using Words = SignedCodeWords<S::kBits>;
    uint32 codes[S::kTogether][kSteps][4];
    float scale[S::kTogether][2];

    // slot: its address; row: offset of the word of row g in it.
    __device__ __forceinline__ void expand(uint32 slot, uint32 row, int first, int g) {
        const uint32 pair = row / (16 * kLineBytes) * 8 + g;  // of a line's scales
#pragma unroll
        for (int i = 0; i < S::kTogether; ++i) {
            const uint32 at = slot + S::kPlanesBytes + ((first + i) * kBlockRows / 2 + pair) * sizeof(uint32);
            const uint32 both = loadShared4(at);
            scale[i][0] = halfToFloat(uint16(both)), scale[i][1] = halfToFloat(uint16(both >> 16));
            const Words upper = wordsOfLine<Words, S::kBits, false>(slot + row, first + i, g);
            const Words lower = wordsOfLine<Words, S::kBits, true>(slot + row, first + i, g);
#pragma unroll
            for (int s = 0; s < kSteps; ++s) codesOfStep(upper, lower, s, codes[i][s]);
        }
    }
};

// Lines from this one on: their products, which join the item's sums times their scales. `next` are those behind them,
// expanded while the products run.
template <class S, int kStages, int kSlots>
__device__ __forceinline__ void multiplyLines(float* sums, StagesOfX<S, kStages>& x, SlotsOfW<S, ScaledLines<S>, kSlots>& w,
                                              int line, int count, const ScaledLines<S>& own, ScaledLines<S>& next,
                                              const Turns<S>& turns) {
    int dots[S::kTogether][S::kSums];
    const uint32 from = x.line(line);
    const bool last = line + S::kTogether >= count;
    if (last) w.turn();
    turns.wait();
    productFence();
#pragma unroll
    for (int i = 0; i < S::kTogether; ++i) {
        using Product = RegisterBytesProduct<S::kTokens, true>;
        const uint32(&codes)[kSteps][4] = own.codes[i];
        const uint32 line = from + i * S::kTokenBytes;
        Product::template add<false>(dots[i], codes[0][0], codes[0][1], codes[0][2], codes[0][3], operandDescriptor(line));
#pragma unroll
        for (int s = 1; s < kSteps; ++s) {
            Product::add(dots[i], codes[s][0], codes[s][1], codes[s][2], codes[s][3],
                         operandDescriptor(line + s * kWgmmaDepthBytes));
        }
    }
    productCommit();
    turns.handOn();
    next.expand(w.slot(), w.row, last ? 0 : line + S::kTogether, w.g);
    x.finish(min(line + S::kTogether, count) - 1, count);
#pragma unroll
    for (int i = 0; i < S::kTogether * S::kSums; ++i) asm volatile("" : "+r"(dots[i / S::kSums][i % S::kSums]));  // no sooner
#pragma unroll
    for (int i = 0; i < S::kSums; ++i) {
#pragma unroll
        for (int l = 0; l < S::kTogether; ++l) sums[i] = __fmaf_rn(own.scale[l][i / 2 % 2], __int2float_rn(dots[l][i]), sums[i]);
    }
}

// The products of a slot's 1024 columns, or of the fewer lines that K has left. A line behind these has bytes of no meaning
// and scales of 0.
template <class S, int kStages, int kSlots>
__device__ __forceinline__ void multiplyScaled(float* sums, StagesOfX<S, kStages>& x, SlotsOfW<S, ScaledLines<S>, kSlots>& w,
                                               const Turns<S>& turns, int count) {
    ScaledLines<S> second;
#pragma unroll 1
    for (int line = 0; line < count; line += 2 * S::kTogether) {
        multiplyLines<S>(sums, x, w, line, count, w.first, second, turns);
        if (line + S::kTogether >= count) {
            w.first.expand(w.slot(), w.row, 0, w.g);  // again: copies of these registers would wait for the products
            return;
        }
        multiplyLines<S>(sums, x, w, line + S::kTogether, count, second, w.first, turns);
    }
}

template <int kBits, int kTokens, int kWarpgroups, int kSlots, int kStages>
__global__ void __launch_bounds__((kWarpgroups + 1) * kWarpgroup, 1)
    bipolarGemmGrouped(const uint8* __restrict__ xTiles, const uint8* __restrict__ wTiles,  // bytes of x, planes of W
                       const uint8* __restrict__ scaleTiles, const float* __restrict__ offsets,  // as above; [N]
                       const int* xSums, const float* xSteps,  // [M] or [2, M], and [M]; written until the wait
                       const void* __restrict__ bias,          // [N] of y's type, or null
                       uint8* __restrict__ y,                  // [M, N]
                       uint32* partials, uint32* ready,        // SharedItem
                       int M, int N, int K, int actLimit,
                       int zero, int dtype,  // whether tokens have zero points; of y
                       int rowTiles, int tokenTiles, int tokenBand, int wholeItems, int splits) {
    using S = GroupedShape<kBits, kTokens, kWarpgroups>;
    constexpr float kUnit = float(1 << kBits) / 64.f;  // dots count 2^(p - 7), and y takes them twice
    extern __shared__ uint8 dynamicShared[];
    __shared__ float2 tokens[kLineSets][kTokens];     // c, step
    __shared__ float2 features[kLineSets][S::kRows];  // offset, bias
    const FusedProblem p{xTiles, wTiles, scaleTiles, partials, ready, M, N, K, rowTiles, tokenTiles, tokenBand, wholeItems, splits};

    const auto load = [&](int set, const FusedPlace& place, int thread) {
#pragma unroll 1
        for (int i = thread; i < kTokens; i += kLineThreads) {
            const int m = min(place.token + i, M - 1);
            tokens[set][i] = make_float2(float(zero ? xSums[size_t(M) + m] : actLimit), xSteps[m]);
        }
#pragma unroll 1
        for (int i = thread; i < S::kRows; i += kLineThreads) {
            const int n = min(place.block * kBlockRows + i, N - 1);
            features[set][i] = make_float2(offsets[n], bias == nullptr ? 0.f : loadElement(bias, n, dtype));
        }
    };
    const auto multiply = [&](float* sums, auto& x, auto& w, const Turns<S>& turns, const Segment& segment) {
#pragma unroll 1
        for (int k = segment.firstTile; k < segment.firstTile + segment.tiles; ++k) {
            multiplyScaled(sums, x, w, turns, min(kChunksPerLine, p.lines() - k * kChunksPerLine));
        }
    };
    const auto write = [&](const float* sums, int set, const FusedPlace& place, bool split, int warpgroup, int thread) {
        const int row = warpgroup * kBlockRows + thread / kWarpSize * 16 + thread % kWarpSize / 4;
        const float2 of[2] = {features[set][featureOfRow(row)], features[set][featureOfRow(row + 8)]};
        const Place to{y, place.token, place.block * kBlockRows, M, N};
        writeItem<S>(sums, to, split, thread, dtype, [&](float sum, int half, int token) {
            const float2 ofToken = tokens[set][token];
            const float v = __fmaf_rn(sum, kUnit, -__fmul_rn(ofToken.x, of[half].x));
            return __fmaf_rn(v, ofToken.y, of[half].y);
        });
    };
    runItems<S, ScaledLines<S>, float, kSlots, kStages>(p, dynamicShared, load, multiply, write);
}
