// Activations as signed bytes, in the fragment order of the INT8 tensor cores' B operand.
//
//   c = 256 hi + lo,  hi = (c + 128) >> 8,  lo = c - 256 hi,  both in [-128, 128): codes c of codes.cuh up to 32639
// A segment whose largest element would have a larger code takes twice the scale: in about one of 200 the error is at
// most 2^-14.99 of the largest element, not 2^-15.
//
// A record holds one k tile of four tokens, each half of it (128 columns):
//   bytes  [m / 2][lane = 4 (2 token + kind) + t] uint4 {b0, b1 of product m, b0, b1 of product m + 1}
//          kind 0: hi, 1: lo. Byte n of b_r is of column 16 H + 4 n + j of the half tile, where bits j of the four
//          digits of half word H make one register (int8_step.cuh):
//            kSegment 128: H = 2 t + r, j = m;  64: H = 4 (m / 2) + t, j = 2 (m % 2) + r;
//            kSegment 32: H = 2 m + t / 2, j = 2 (t % 2) + r
//   about  [segment][token] uint4 {scale s, fp32; kRoundToInteger's bits + 2 P3 - P; sum of the codes P, fp32; 0}
//          P3: sum of the codes of columns 3, 7, 11, ...
//
// A record of a token by itself (kApart), each half of it: every word of 32 columns has a scale and columns of B of its
// own, which are zero where another word's bytes would be multiplied.
//   bytes  [m / 2][2 word + kind, then one of zeros] uint4, as for a kSegment of 128
//   about  [word] uint4
#pragma once
#include "codes.cuh"

constexpr int kByteTokens = 4;
constexpr int kByteKinds = 2;
constexpr int kDigits = 8, kDigitBits = 4;      // of a word
constexpr int kHalfBytes = 2 * kWarpSize * sizeof(uint4);
constexpr uint32 kByteExcess = 65792;           // (2^15 - 32639.5) * 2^9: larger codes end at 32639
constexpr uint32 kByteMiddle = 128;

// Four bytes of kind 1 and of kind 0 from four codes, each 128 more than it is.
__device__ __forceinline__ void packBytes(uint32 a, uint32 b, uint32 c, uint32 d, uint32& low, uint32& high) {
    const uint32 first = __byte_perm(a, b, 0x5140), second = __byte_perm(c, d, 0x5140);
    low = __byte_perm(first, second, 0x5410) ^ 0x80808080u;
    high = __byte_perm(first, second, 0x7632);
}

// What 32 columns become: bytes [digit's bit][half word] of both kinds, and what stands in `about`.
struct WordBytes {
    uint32 low[kDigitBits][2], high[kDigitBits][2];
    uint4 about;
};

// Of 32 values per lane; the kLanes neighbours of a segment share a scale. Whole warps call it.
template <int kLanes>
__device__ __forceinline__ WordBytes wordBytes(const Elements& x) {
    const SegmentScale scale = segmentScale<kLanes, kByteExcess>(x.largest);
    const float inverse = scale.inverse();
    int low[2] = {}, high[2] = {};  // sums of bytes: of columns 3, 7, 11, ..., and of the others
    WordBytes bytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int bit = 0; bit < kDigitBits; ++bit) {
            uint32 code[kDigits / 2];
#pragma unroll
            for (int n = 0; n < kDigits / 2; ++n) {
                const float value = x.values[half * kBitsPerWord / 2 + n * kDigitBits + bit];
                code[n] = __float_as_uint(fmaf(value, inverse, kRoundToInteger + kByteMiddle));
            }
            packBytes(code[0], code[1], code[2], code[3], bytes.low[bit][half], bytes.high[bit][half]);
            const int rest = bit < kDigitBits - 1;
            low[rest] = addBytes(bytes.low[bit][half], low[rest]);
            high[rest] = addBytes(bytes.high[bit][half], high[rest]);
        }
    }
    const int thirds = 256 * high[0] + low[0], total = thirds + 256 * high[1] + low[1];
    const int sum = segmentSum<kLanes>(total), third = segmentSum<kLanes>(thirds);
    bytes.about = make_uint4(__float_as_uint(scale.scale()), kRoundToIntegerBits + uint32(2 * third - sum),
                             __float_as_uint(float(sum)), 0);
    return bytes;
}

// Bytes of two products, the digits' bits 2 v and 2 v + 1.
__device__ __forceinline__ uint4 twoProducts(const uint32 (&bytes)[kDigitBits][2], int v) {
    return make_uint4(bytes[2 * v][0], bytes[2 * v][1], bytes[2 * v + 1][0], bytes[2 * v + 1][1]);
}

template <int kSegment, bool kApart>
struct ByteRecord {
    static constexpr int kLanes = kSegment / kBitsPerWord, kHalfSegments = kTileQuads / kLanes;
    static constexpr int kPairBytes = kWarpSize * sizeof(uint4);  // from a pair of products to the next
    static constexpr int kHalf = kHalfBytes + kHalfSegments * kByteTokens * sizeof(uint4), kBytes = 2 * kHalf;

    // Bytes [digit's bit][half word] of 32 columns, where the products above read them. to: of the half tile's record,
    // lane 4 (2 token + kind).
    static __device__ __forceinline__ void store(const uint32 (&bytes)[kDigitBits][2], int word, uint4* to) {
        if constexpr (kSegment == 4 * kBitsPerWord) {
#pragma unroll
            for (int v = 0; v < 2; ++v) to[v * kWarpSize + word] = twoProducts(bytes, v);
        } else if constexpr (kSegment == 2 * kBitsPerWord) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                to[word / 2 * kWarpSize + word % 2 * 2 + half] =
                    make_uint4(bytes[0][half], bytes[1][half], bytes[2][half], bytes[3][half]);
            }
        } else {
            uint2* pairs = reinterpret_cast<uint2*>(to + word / 2 * kWarpSize) + word % 2;
#pragma unroll
            for (int t = 0; t < kTileQuads; ++t) {
                pairs[2 * t] = make_uint2(bytes[t % 2 * 2][t / 2], bytes[t % 2 * 2 + 1][t / 2]);
            }
        }
    }

    // Bytes of 32 values per lane, word `word` of the tile row; the lanes of a segment are neighbours. Whole warps call
    // it. valid: whether to write. token: of the four.
    static __device__ __forceinline__ void write(const Elements& x, uint32 word, bool valid, unsigned char* record,
                                                 uint32 token) {
        const WordBytes bytes = wordBytes<kLanes>(x);
        if (!valid) return;

        unsigned char* half = record + word / kTileQuads * kHalf;
        uint4* own = reinterpret_cast<uint4*>(half) + token * kByteKinds * kTileQuads;
        store(bytes.high, word % kTileQuads, own);
        store(bytes.low, word % kTileQuads, own + kTileQuads);
        if (word % kLanes == 0) {
            reinterpret_cast<uint4*>(half + kHalfBytes)[word % kTileQuads / kLanes * kByteTokens + token] = bytes.about;
        }
    }
};

template <int kSegment>
struct ByteRecord<kSegment, true> {
    static constexpr int kZeros = kTileQuads * kByteKinds, kPairBytes = (kZeros + 1) * sizeof(uint4);
    static constexpr int kAbout = 2 * kPairBytes, kHalf = kAbout + kTileQuads * sizeof(uint4), kBytes = 2 * kHalf;

    static __device__ __forceinline__ void write(const Elements& x, uint32 word, bool valid, unsigned char* record,
                                                 uint32) {
        const WordBytes bytes = wordBytes<1>(x);
        if (!valid) return;

        const int own = word % kTileQuads;
        unsigned char* half = record + word / kTileQuads * kHalf;
#pragma unroll
        for (int v = 0; v < 2; ++v) {
            uint4* to = reinterpret_cast<uint4*>(half + v * kPairBytes);
            to[own * kByteKinds] = twoProducts(bytes.high, v);
            to[own * kByteKinds + 1] = twoProducts(bytes.low, v);
            if (own == 0) to[kZeros] = make_uint4(0, 0, 0, 0);
        }
        reinterpret_cast<uint4*>(half + kAbout)[own] = bytes.about;
    }
};
