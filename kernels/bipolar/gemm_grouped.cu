// bipolarGemmGrouped: y[M, N] = x W^T + bias for bipolar-INT operands whose weight has a scale per row and group of columns,
// planes of W turned into values in registers: gemm_fused.cuh (Bipolar-INT sections 3.2, 4.1).
//
//   dot[m, n, l] = sum_(k in line l) u_x[m, k] v_w[n, k]                  exact, in integers
//   y[m, n] = step[m] (2 sum_l scale[n, l] dot[m, n, l] - c[m] offset[n]) + bias[n]
//   offset[n] = sum_l scale[n, l] sum_(k in line l) v_w[n, k],  c = 2^q - 1, or twice the token's zero point
//
// v_w = 2 u_w - (2^p - 1), times 2^(7 - p), are signed bytes (SignedCodeWords), so a sum of the codes of x per group is not
// needed. Groups are whole lines of 128 columns. Every line has integers of its own, which become floats while the next
// ones are multiplied. Sums over lines are fp32 in a fixed order.
//
//   scaleTiles [row block of 64][stretch][8 lines][16 w + 2 g + h] fp16: of tile row 16 w + g + 8 h; 0 behind the last line
// Limits: p < 8; a line's sum is below 128 * 255 * 127 < 2^24, exact as a float.
#include "gemm_items.cuh"

template <int kBits_, int kTokens_, int kWarpgroups_>
struct GroupedShape : FusedShape<kBits_, kTokens_, kWarpgroups_> {
    using Base = FusedShape<kBits_, kTokens_, kWarpgroups_>;
    static constexpr int kScaleBytes = kChunksPerLine * kBlockRows * sizeof(uint16);
    static constexpr int kSlotBytes = Base::kPlanesBytes + kScaleBytes;
    static constexpr int kSets = 1;
    static constexpr bool kTurns = false;
    // Of a line, so many tokens have products that end together.
    static constexpr int kUnits = kTokens_ > 64 ? kTokens_ / 64 : 1, kUnitTokens = kTokens_ / kUnits;
    static constexpr int kUnitSums = kUnitTokens / 2, kUnitBytes = kUnitTokens * kLineBytes;
};

// The values of a lane in a line, and the scales of its rows g and g + 8.
template <class S>
struct ScaledLine {
    using Words = SignedCodeWords<S::kBits>;
    uint32 codes[kSteps][4], scales;

    // slot: its address; row: offset of the word of row g in it.
    __device__ __forceinline__ void expand(uint32 slot, uint32 row, int line, int g) {
        const uint32 pair = row / (16 * kLineBytes) * 8 + g;  // of a line's scales
        scales = loadShared4(slot + S::kPlanesBytes + (line * kBlockRows / 2 + pair) * sizeof(uint32));
        const Words upper = wordsOfLine<Words, S::kBits, false>(slot + row, line, g);
        const Words lower = wordsOfLine<Words, S::kBits, true>(slot + row, line, g);
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            codesOfStep(upper, lower, s, codes[s]);
#pragma unroll
            for (int i = 0; i < 4; ++i) keepInRegister(codes[s][i]);  // now, not where products take them
        }
    }

    // Ask for the products with the tokens at this address.
    __device__ __forceinline__ void multiply(int* dots, uint32 x) const {
        using Product = RegisterBytesProduct<S::kUnitTokens, true>;
        productFence();
        Product::template add<false>(dots, codes[0][0], codes[0][1], codes[0][2], codes[0][3], operandDescriptor(x));
#pragma unroll
        for (int s = 1; s < kSteps; ++s) {
            Product::add(dots, codes[s][0], codes[s][1], codes[s][2], codes[s][3], operandDescriptor(x + s * kWgmmaDepthBytes));
        }
        productCommit();
    }

    // Products that have ended join the sums, times their scales.
    __device__ __forceinline__ void add(float* sums, int* dots) const {
        const float scale[2] = {halfToFloat(uint16(scales)), halfToFloat(uint16(scales >> 16))};
#pragma unroll
        for (int i = 0; i < S::kUnitSums; ++i) asm volatile("" : "+r"(dots[i]));  // no sooner
#pragma unroll
        for (int i = 0; i < S::kUnitSums; ++i) sums[i] = __fmaf_rn(scale[i / 2 % 2], __int2float_rn(dots[i]), sums[i]);
    }
};

// The products of the fewer lines that K has left.
template <class S, int kStages, int kSlots>
__device__ __forceinline__ void multiplyLines(float* sums, StagesOfX<S, kStages>& x, SlotsOfW<S, ScaledLine<S>, kSlots>& w,
                                              int count) {
    int dots[S::kUnitSums];
#pragma unroll 1
    for (int line = 0; line < count; ++line) {
        if (line > 0) w.first.expand(w.slot(), w.row, line, w.g);
        const uint32 from = x.line(line);
#pragma unroll
        for (int unit = 0; unit < S::kUnits; ++unit) {
            w.first.multiply(dots, from + unit * S::kUnitBytes);
            productWait<0>();
            w.first.add(sums + unit * S::kUnitSums, dots);
        }
        x.finish(line, count);
    }
    w.turn();
    w.first.expand(w.slot(), w.row, 0, w.g);
}

// The products of a slot's 1024 columns. Those of two units run at a time: the ones before become floats meanwhile, and the
// next line is expanded.
template <class S, int kStages, int kSlots>
__device__ __forceinline__ void multiplyStretch(float* sums, StagesOfX<S, kStages>& x,
                                                SlotsOfW<S, ScaledLine<S>, kSlots>& w) {
    constexpr int kUnits = S::kUnits;
    ScaledLine<S> second;
    int dots[2][S::kUnitSums];
    uint64* read = nullptr;  // the barrier of a stage that products still read
#pragma unroll
    for (int line = 0; line < kChunksPerLine; ++line) {
        ScaledLine<S>&own = line % 2 ? second : w.first, &other = line % 2 ? w.first : second;
        const bool last = line + 1 == kChunksPerLine;
        if (line > 0 && line % S::kStageLines == 0) read = x.leave();
        const uint32 from = x.line(line);
        const auto expandNext = [&] {
            if (last) w.turn();
            other.expand(w.slot(), w.row, last ? 0 : line + 1, w.g);
        };
#pragma unroll
        for (int unit = 0; unit < kUnits; ++unit) {
            const int number = line * kUnits + unit, before = (unit + kUnits - 1) % kUnits;
            own.multiply(dots[number % 2], from + unit * S::kUnitBytes);
            if (kUnits > 1 && unit + 1 == kUnits) expandNext();
            if (number > 0) {
                productWait<1>();
                (unit > 0 ? own : other).add(sums + before * S::kUnitSums, dots[(number - 1) % 2]);
                if (unit == 0 && line % S::kStageLines == 0) x.giveBack(read);
            }
            if (kUnits == 1) expandNext();  // the line before has been read
        }
    }
    productWait<0>();
    second.add(sums + (kUnits - 1) * S::kUnitSums, dots[1]);
    x.giveBack(x.leave());
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
    const auto multiply = [&](float* sums, auto& x, auto& w, const Turns<S>&, const Segment& segment) {
#pragma unroll 1
        for (int k = segment.firstTile; k < segment.firstTile + segment.tiles; ++k) {
            const int count = p.lines() - k * kChunksPerLine;
            if (count < kChunksPerLine) multiplyLines<S>(sums, x, w, count);
            else multiplyStretch<S>(sums, x, w);
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
    runItems<S, ScaledLine<S>, float, kSlots, kStages>(p, dynamicShared, load, multiply, write);
}
