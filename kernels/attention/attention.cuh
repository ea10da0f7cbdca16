// What mma.cu and quantize.cu share: codes of Q, K and V, and the order of K and V.
//
//     code = clamp(round(x / step), -127, 127), half to even; NaN gives 0
//
// Keys and values of one head lie in tiles of 64 keys, kDim bytes each: 64 kDim bytes of K, then as many of V. A lane
// 4 g + t of a warp finds its share of a product's operand in neighbouring bytes, 16 bytes for two products, and the 32
// lanes read 512 bytes in a row, so shared memory serves them without conflicts.
//   K   [8 keys][64 dims][lane][16]: key g, dims 16 t ..; the last 32 of a width such as 96: [lane][8], dims 8 t ..
//       Q's registers take the same dims; the order of a sum over dims is free.
//   V   [32 keys][two column tiles][lane][16]: column g of tile 2 j at keys {2t, 2t+1, 8+2t, 9+2t} and 16 more, then of
//       tile 2 j + 1. These are the keys whose scores lane 4 g + t holds after Q K^T, so codes of P need no exchange.
//       Column g of column tile n is dim 32 (n / 4) + 8 (g / 2) + 2 (n % 4) + g % 2, so that a lane ends with eight
//       neighbouring dims of the output.
#pragma once
#include "../shared/mma.cuh"

constexpr int kMostCode = QK_MOST_CODE;
constexpr int kTileKeys = QK_TILE_KEYS, kStepKeys = 32, kGroupKeys = 8;
constexpr int kPairDims = 64;                  // of two products
constexpr int kRun = QK_RUN;                   // elements converted at a time
constexpr int kPieceBytes = 512;               // a warp's 16 bytes each
constexpr float kIntegerBase = 12582912.f;     // 1.5 * 2^23: a float this far up counts in ones, from -2^22 to 2^22
constexpr int kIntegerBaseBits = 0x4b400000;
constexpr uint32 kPack01 = 0x0040, kPack23 = 0x5410;  // selectors: low bytes of two words; low halves of two words

// The value of one code, lifted with what it divides where it is so small that its reciprocal or a remainder would be
// none. limit: 127 steps.
struct Step {
    float size, inverse, limit, lift;
};

__device__ __forceinline__ Step stepOf(float size) {
    constexpr float kSmallest = 1.0e-20f, kLift = 18446744073709551616.f;  // 2^64
    const float lift = size < kSmallest ? kLift : 1.f, lifted = __fmul_rn(size, lift);
    return {lifted, __frcp_rn(lifted), __fmul_rn(lifted, float(kMostCode)), lift};
}

// The code of a finite, lifted value in the low byte. Two corrections by the exact remainder make the quotient the
// correctly rounded one.
__device__ __forceinline__ uint32 plainCodeOf(float value, const Step& step) {
    const float x = fminf(fmaxf(value, -step.limit), step.limit);
    float q = __fmul_rn(x, step.inverse);
    q = __fmaf_rn(__fmaf_rn(-q, step.size, x), step.inverse, q);
    q = __fmaf_rn(__fmaf_rn(-q, step.size, x), step.inverse, q);
    return __float_as_uint(__fadd_rn(q, kIntegerBase));
}

// The code in the low byte.
__device__ __forceinline__ uint32 codeOf(float value, const Step& step) {
    return plainCodeOf(value == value ? __fmul_rn(value, step.lift) : 0.f, step);
}

// Four codes, the first in the low byte.
__device__ __forceinline__ uint32 packBytes(uint32 a, uint32 b, uint32 c, uint32 d) {
    return selectBytes(selectBytes(a, b, kPack01), selectBytes(c, d, kPack01), kPack23);
}

// Elements of one operand [batch, heads, rows, dims]. dims: a multiple of 8, neighbours in memory; runs of 8 are
// aligned to 16 bytes.
struct Source {
    const void* base;
    int batchStride, headStride, rowStride, dims, dtype;
};

__device__ __forceinline__ size_t rowStart(const Source& from, int batch, int head, int row) {
    return size_t(batch) * from.batchStride + size_t(head) * from.headStride + size_t(row) * from.rowStride;
}

// Neighbouring elements as they lie in memory; kWide: of four bytes, else of two.
template <int kCount, bool kWide>
struct Raw {
    static constexpr int kWords = kCount / (kWide ? 1 : 2);
    uint32 words[kWords];
};

// kCount elements from `dim` of the row that starts at `start`; 0 behind the last dim and where not present. Apart from
// floatsOf, so that several loads are under way at once.
template <int kCount, bool kWide>
__device__ __forceinline__ Raw<kCount, kWide> loadRaw(const Source& from, size_t start, int dim, bool present) {
    Raw<kCount, kWide> raw = {};
    const uint8* at = static_cast<const uint8*>(from.base) + (start + dim) * (kWide ? 4 : 2);
    if (present && dim < from.dims) {
        if constexpr (raw.kWords == 2) {
            const uint2 pair = *reinterpret_cast<const uint2*>(at);
            raw.words[0] = pair.x, raw.words[1] = pair.y;
        } else {
#pragma unroll
            for (int w = 0; w < raw.kWords; w += 4) {
                const uint4 four = reinterpret_cast<const uint4*>(at)[w / 4];
                raw.words[w] = four.x, raw.words[w + 1] = four.y;
                raw.words[w + 2] = four.z, raw.words[w + 3] = four.w;
            }
        }
    }
    return raw;
}

template <int kCount, bool kWide>
__device__ __forceinline__ void floatsOf(const Raw<kCount, kWide>& raw, int dtype, float (&x)[kCount]) {
    if constexpr (kWide) {
#pragma unroll
        for (int i = 0; i < kCount; i++) x[i] = __uint_as_float(raw.words[i]);
    } else if (dtype == kFloat16) {
#pragma unroll
        for (int i = 0; i < kCount; i++) x[i] = halfToFloat(uint16(raw.words[i / 2] >> i % 2 * 16));
    } else {
#pragma unroll
        for (int i = 0; i < kCount; i++) x[i] = bfloatToFloat(uint16(raw.words[i / 2] >> i % 2 * 16));
    }
}

__device__ __forceinline__ void loadRun(const Source& from, size_t start, int dim, float (&x)[kRun]) {
    if (from.dtype == kFloat32) {
        floatsOf(loadRaw<kRun, true>(from, start, dim, true), from.dtype, x);
    } else {
        floatsOf(loadRaw<kRun, false>(from, start, dim, true), from.dtype, x);
    }
}

// Whether no element is NaN or Inf.
__device__ __forceinline__ bool isFinite(const float (&x)[kRun]) {
    float none = 0.f;
#pragma unroll
    for (int i = 0; i < kRun; i++) none = __fmaf_rn(x[i], 0.f, none);
    return none == 0.f;
}

__device__ __forceinline__ uint2 runCodes(const float (&x)[kRun], const Step& step) {
    uint32 codes[kRun];
    if (step.lift == 1.f && isFinite(x)) {
#pragma unroll
        for (int i = 0; i < kRun; i++) codes[i] = plainCodeOf(x[i], step);
    } else {
#pragma unroll
        for (int i = 0; i < kRun; i++) codes[i] = codeOf(x[i], step);
    }
    return make_uint2(packBytes(codes[0], codes[1], codes[2], codes[3]),
                      packBytes(codes[4], codes[5], codes[6], codes[7]));
}
