// Activations as 16 fixed-point bit planes, in the fragment order of the binary tensor cores' A operand.
//
// A segment of kSegment columns of x shares the power of two s that brings its largest element below 2^15:
//   x[k] ~ s * c[k],  c[k] = round(x[k] / s) in [-2^15, 2^15),  c = sum_{p<15} 2^p bit_p - 2^15 bit_15
// so an element is exact where its last mantissa bit is at least s, that is within a factor 2^4 (fp16) or 2^7 (bf16)
// of the segment's largest; below that its error is at most s / 2 = 2^-15 of the largest.
// Zero segments have s = 0; a segment with an Inf or NaN has s = NaN, so every output that reads it is NaN.
// bf16 segments whose largest element is below 2^-112 keep fewer bits.
#pragma once
#include "bcq_tiles.cuh"

constexpr int kPlanes = 16;
constexpr int kValuesPerThread = kBitsPerWord;  // one word of every plane
constexpr int kPairs = kValuesPerThread / 2;    // 32-bit registers holding two 16-bit codes
constexpr int kVectorValues = 8;                // 16-bit elements per 16-byte load

constexpr uint32 kExponentShift = 23;
constexpr uint32 kInfiniteExponent = 255;
constexpr uint32 kSmallestExponent = 15;        // keeps s = 2^(exponent - 127 - 14) a normal number
constexpr uint32 kScaleBits = 14;               // largest code: below 2^15
constexpr uint32 kInverseBias = 2 * 127 + kScaleBits;
constexpr float kRoundToInteger = 12582912.0f;  // 1.5 * 2^23: the float whose low bits count in ones
constexpr uint32 kRoundToIntegerBits = 0x4b400000;

// Lane t of a quad counts planes 2t, 2t + 1, 2t + 8 and 2t + 9, in units of 2^(2t).
constexpr int kQuadLow1 = 2, kQuadHigh0 = 256, kQuadHigh1 = 512;
__device__ __forceinline__ int quadSignWeight(int quad) { return quad == kTileQuads - 1 ? -kQuadHigh1 : kQuadHigh1; }

// 32 consecutive elements of x; zeros behind `columns`.
__device__ __forceinline__ void loadValues(const uint16* x, int first, int columns, int dtype, bool vectors,
                                           float (&values)[kValuesPerThread]) {
    if (vectors) {  // columns is a multiple of 8 and x is 16-byte aligned: a vector is inside or outside
#pragma unroll
        for (int v = 0; v < kValuesPerThread / kVectorValues; ++v) {
            const int column = first + v * kVectorValues;
            uint4 raw = make_uint4(0, 0, 0, 0);
            if (column < columns) raw = *reinterpret_cast<const uint4*>(x + column);
            const uint32 pairs[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                values[v * kVectorValues + 2 * i] = shortToFloat(uint16(pairs[i]), dtype);
                values[v * kVectorValues + 2 * i + 1] = shortToFloat(uint16(pairs[i] >> 16), dtype);
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < kValuesPerThread; ++i) {
            values[i] = first + i < columns ? shortToFloat(x[first + i], dtype) : 0.0f;
        }
    }
}

// Transpose two 16 x 16 bit matrices held in the low and high halves of 16 registers: afterwards bit i (16 + i) of
// words[p] is bit p of the low (high) half of the register i.
__device__ __forceinline__ void transposeBits(uint32 (&words)[kPairs]) {
    constexpr uint32 masks[4] = {0x00ff00ff, 0x0f0f0f0f, 0x33333333, 0x55555555};
#pragma unroll
    for (int stage = 0; stage < 4; ++stage) {
        const int distance = 8 >> stage;
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
            if (i & distance) continue;
            const uint32 swapped = ((words[i] >> distance) ^ words[i + distance]) & masks[stage];
            words[i + distance] ^= swapped;
            words[i] ^= swapped << distance;
        }
    }
}

// Planes of 32 values per lane; the lanes of a segment (kSegment / 32 neighbours) share a scale. Whole warps call it.
// planes: [k tile][lane = 4 (p % 8) + t] uint4 {planes p, p + 8 of word t; the same of word t + 4}: the B operand of
// two binaryMma256. meta: [k tile][segment][t] {scale s, kRoundToInteger + sum of the codes' bits that lane t counts}.
// word: index of the 32 columns, counted from the first k tile of `planes`. valid: whether to write.
template <int kSegment>
__device__ __forceinline__ void writePlanes(const float (&values)[kValuesPerThread], int word, bool valid,
                                            uint4* planes, float2* meta) {
    constexpr int kLanes = kSegment / kBitsPerWord;
    uint32 largest = 0;  // as bits, so that NaN > Inf > every number
#pragma unroll
    for (int i = 0; i < kValuesPerThread; ++i) largest = max(largest, __float_as_uint(values[i]) & 0x7fffffffu);
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2) largest = max(largest, __shfl_xor_sync(kFullWarp, largest, mask));

    const uint32 exponent = max(largest >> kExponentShift, kSmallestExponent);
    const bool finite = exponent < kInfiniteExponent;
    const float inverse = finite ? __uint_as_float((kInverseBias - exponent) << kExponentShift) : 0.0f;
    uint32 words[kPairs];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
        const uint32 low = __float_as_uint(fmaf(finite ? values[i] : 0.0f, inverse, kRoundToInteger));
        const uint32 high = __float_as_uint(fmaf(finite ? values[i + kPairs] : 0.0f, inverse, kRoundToInteger));
        words[i] = __byte_perm(low, high, 0x5410);
    }
    transposeBits(words);
    int sums[kTileQuads];
#pragma unroll
    for (int t = 0; t < kTileQuads; ++t) {
        sums[t] = __popc(words[2 * t]) + kQuadLow1 * __popc(words[2 * t + 1]) +
                  kQuadHigh0 * __popc(words[2 * t + kPlanes / 2]) +
                  quadSignWeight(t) * __popc(words[2 * t + 1 + kPlanes / 2]);
#pragma unroll
        for (int mask = 1; mask < kLanes; mask *= 2) sums[t] += __shfl_xor_sync(kFullWarp, sums[t], mask);
    }
    if (!valid) return;

    const int kTile = word / kWordsPerTileRow, quad = word % kTileQuads, half = word % kWordsPerTileRow / kTileQuads;
    uint2* column = reinterpret_cast<uint2*>(planes + kTile * kWarpSize + quad) + half;
#pragma unroll
    for (int p = 0; p < kPlanes / 2; ++p) column[2 * kTileQuads * p] = make_uint2(words[p], words[p + kPlanes / 2]);
    if (word % kLanes == 0) {
        const float zeroOrScale = largest ? __uint_as_float((exponent - kScaleBits) << kExponentShift) : 0.0f;
        const float scale = finite ? zeroOrScale : __uint_as_float(kNotANumberBits);
#pragma unroll
        for (int t = 0; t < kTileQuads; ++t) {
            meta[word / kLanes * kTileQuads + t] = make_float2(scale, kRoundToInteger + float(sums[t]));
        }
    }
}

// Planes of `kTiles` k tiles of one row of x from column `first` on, by all threads of the block; zeros behind
// `columns`. Not inlined: it runs once per pass, and the caller's loops keep their registers.
template <int kSegment>
__device__ __noinline__ void makePlanes(const uint16* x, int first, int columns, int kTiles, int dtype, bool vectors,
                                        uint4* planes, float2* meta) {
    const int words = kTiles * kWordsPerTileRow;
    for (int start = threadIdx.x / kWarpSize * kWarpSize; start < words; start += blockDim.x) {
        const int word = start + threadIdx.x % kWarpSize;
        float values[kValuesPerThread];
        loadValues(x, word < words ? first + word * kBitsPerWord : columns, columns, dtype, vectors, values);
        writePlanes<kSegment>(values, word, word < words, planes, meta);
    }
}
