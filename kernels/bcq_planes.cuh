// Activations as 16 fixed-point bit planes, in the fragment order of the binary tensor cores' B operand.
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

// The value of a count of planes 2t, 2t + 1 (low) or 2t + 8, 2t + 9 (high), as two fp16: 2^p, -2^15 for the sign.
constexpr uint32 kHalfOneBits = 0x3c00, kHalfExponentShift = 10, kHalfSignBit = 0x8000;
__device__ __forceinline__ uint32 planeWeights(int quad, bool high) {
    const int first = 2 * quad + (high ? kPlanes / 2 : 0);
    const uint32 one = kHalfOneBits + (first << kHalfExponentShift), two = one + (1 << kHalfExponentShift);
    return one | (first + 1 == kPlanes - 1 ? two | kHalfSignBit : two) << 16;
}

// A record holds one k tile of one row of x:
//   planes [lane = 4 (p % 8) + t] uint4 {planes p, p + 8 of word t; the same of word t + 4}: B of two binaryCount256
//   about  [segment] float2 {scale s, sum of the codes}
constexpr int kPlaneBytes = kWarpSize * sizeof(uint4);
template <int kSegment>
__host__ __device__ constexpr int recordBytes() {
    return kPlaneBytes + (kSegment < kTileColumns ? kTileColumns / kSegment * int(sizeof(float2)) : int(sizeof(uint4)));
}
// Where segment `segment`, counted from a record's first, keeps its scale and sum.
template <int kSegment>
__device__ __forceinline__ constexpr uint32 aboutOffset(int segment) {
    constexpr int kTileSegments = kTileColumns / kSegment;
    return segment / kTileSegments * recordBytes<kSegment>() + kPlaneBytes + segment % kTileSegments * sizeof(float2);
}

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
// word: index of the 32 columns, counted from the first record. valid: whether to write.
template <int kSegment>
__device__ __forceinline__ void writePlanes(const float (&values)[kValuesPerThread], int word, bool valid,
                                            unsigned char* records) {
    constexpr int kLanes = kSegment / kBitsPerWord;
    uint32 largest = 0;  // as bits, so that NaN > Inf > every number
#pragma unroll
    for (int i = 0; i < kValuesPerThread; ++i) largest = max(largest, __float_as_uint(values[i]) & 0x7fffffffu);
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2) largest = max(largest, __shfl_xor_sync(kFullWarp, largest, mask));

    const uint32 exponent = max(largest >> kExponentShift, kSmallestExponent);
    const bool finite = exponent < kInfiniteExponent;
    const float inverse = finite ? __uint_as_float((kInverseBias - exponent) << kExponentShift) : 0.0f;
    uint32 words[kPairs], total = 0u - kValuesPerThread * kRoundToIntegerBits;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
        const uint32 low = __float_as_uint(fmaf(finite ? values[i] : 0.0f, inverse, kRoundToInteger));
        const uint32 high = __float_as_uint(fmaf(finite ? values[i + kPairs] : 0.0f, inverse, kRoundToInteger));
        total += low + high;
        words[i] = __byte_perm(low, high, 0x5410);
    }
    transposeBits(words);
    int sum = int(total);
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2) sum += __shfl_xor_sync(kFullWarp, sum, mask);
    if (!valid) return;

    unsigned char* record = records + word / kWordsPerTileRow * recordBytes<kSegment>();
    const int quad = word % kTileQuads, half = word % kWordsPerTileRow / kTileQuads;
    uint2* column = reinterpret_cast<uint2*>(record) + quad * 2 + half;
#pragma unroll
    for (int p = 0; p < kPlanes / 2; ++p) column[2 * kTileQuads * p] = make_uint2(words[p], words[p + kPlanes / 2]);
    if (word % kLanes == 0) {
        const float zeroOrScale = largest ? __uint_as_float((exponent - kScaleBits) << kExponentShift) : 0.0f;
        const float scale = finite ? zeroOrScale : __uint_as_float(kNotANumberBits);
        float2* about = reinterpret_cast<float2*>(record + kPlaneBytes);
        about[word % kWordsPerTileRow / kLanes] = make_float2(scale, float(sum));
    }
}

// Planes of `kTiles` k tiles of one row of x from column `first` on, by all threads of the block; zeros behind
// `columns`. Not inlined: it runs once per pass, and the caller's loops keep their registers.
template <int kSegment>
__device__ __noinline__ void makePlanes(const uint16* x, int first, int columns, int kTiles, int dtype, bool vectors,
                                        unsigned char* records) {
    const int words = kTiles * kWordsPerTileRow;
    for (int start = threadIdx.x / kWarpSize * kWarpSize; start < words; start += blockDim.x) {
        const int word = start + threadIdx.x % kWarpSize;
        float values[kValuesPerThread];
        loadValues(x, word < words ? first + word * kBitsPerWord : columns, columns, dtype, vectors, values);
        writePlanes<kSegment>(values, word, word < words, records);
    }
}
