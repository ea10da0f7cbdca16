// Activations as 16 fixed-point bit planes, in the fragment order of the binary tensor cores' B operand:
//   c = sum_{p<15} 2^p bit_p - 2^15 bit_15,  codes c in [-2^15, 2^15) (codes.cuh)
#pragma once
#include "codes.cuh"

constexpr int kPlanes = 16;

// The value of a count of planes 2t, 2t + 1 (low) or 2t + 8, 2t + 9 (high), as two fp16: 2^p, -2^15 for the sign.
constexpr uint32 kHalfOneBits = 0x3c00, kHalfExponentShift = 10, kHalfSignBit = 0x8000;
__device__ __forceinline__ uint32 planeWeights(int quad, bool high) {
    const int first = 2 * quad + (high ? kPlanes / 2 : 0);
    const uint32 one = kHalfOneBits + (first << kHalfExponentShift), two = one + (1 << kHalfExponentShift);
    return one | (first + 1 == kPlanes - 1 ? two | kHalfSignBit : two) << 16;
}

// A record holds one k tile of one token:
//   planes [lane = 4 (p % 8) + t] uint4 {planes p, p + 8 of word t; the same of word t + 4}: B of two binaryCount256
//   about  [segment] float2 {scale s, sum of the codes}
constexpr int kPlaneBytes = kWarpSize * sizeof(uint4);
template <int kSegment>
__host__ __device__ constexpr int recordBytes() {
    return kPlaneBytes + (kSegment < kTileK ? kTileK / kSegment * int(sizeof(float2)) : int(sizeof(uint4)));
}
// Where segment `segment`, counted from a record's first, keeps its scale and sum.
template <int kSegment>
__device__ __forceinline__ constexpr uint32 aboutOffset(int segment) {
    constexpr int kTileSegments = kTileK / kSegment;
    return segment / kTileSegments * recordBytes<kSegment>() + kPlaneBytes + segment % kTileSegments * sizeof(float2);
}

// Transpose two 16 x 16 bit matrices held in the low and high halves of 16 registers: afterwards bit i (16 + i) of
// words[p] is bit p of the low (high) half of the register i.
__device__ __forceinline__ void transposeBits(uint32 (&words)[kValuePairs]) {
    constexpr uint32 masks[3] = {0x0f0f0f0f, 0x33333333, 0x55555555};
#pragma unroll
    for (int i = 0; i < kValuePairs / 2; ++i) {
        const uint32 first = words[i], second = words[i + 8];
        words[i] = __byte_perm(first, second, 0x6240);
        words[i + 8] = __byte_perm(first, second, 0x7351);
    }
#pragma unroll
    for (int stage = 0; stage < 3; ++stage) {
        const int distance = 4 >> stage;
#pragma unroll
        for (int i = 0; i < kValuePairs; ++i) {
            if (i & distance) continue;
            const uint32 first = words[i], second = words[i + distance], mask = masks[stage];
            words[i] = (first & mask) | ((second << distance) & ~mask);
            words[i + distance] = ((first >> distance) & mask) | (second & ~mask);
        }
    }
}

template <int kSegment>
struct PlaneRecord {
    static constexpr int kBytes = recordBytes<kSegment>(), kLanes = kSegment / kBitsPerWord;

    // Planes of 32 values per lane, word `word` of the tile row; the lanes of a segment are neighbours. Whole warps
    // call it. valid: whether to write.
    static __device__ __forceinline__ void write(const Elements& x, uint32 word, bool valid, unsigned char* record,
                                                 uint32) {
        const SegmentScale scale = segmentScale<kLanes, 0>(x.largest);
        const float inverse = scale.inverse();
        uint32 words[kValuePairs];
        int total = 0;
#pragma unroll
        for (int i = 0; i < kValuePairs; ++i) {
            const uint32 low = __float_as_uint(fmaf(x.values[i], inverse, kRoundToInteger));
            const uint32 high = __float_as_uint(fmaf(x.values[i + kValuePairs], inverse, kRoundToInteger));
            words[i] = __byte_perm(low, high, 0x5410);
            total = addHalves(words[i], total);
        }
        transposeBits(words);
        const int sum = segmentSum<kLanes>(total);
        if (!valid) return;

        uint2* column = reinterpret_cast<uint2*>(record) + word % kTileQuads * 2 + word / kTileQuads;
#pragma unroll
        for (int p = 0; p < kPlanes / 2; ++p) column[2 * kTileQuads * p] = make_uint2(words[p], words[p + kPlanes / 2]);
        if (word % kLanes == 0) {
            reinterpret_cast<float2*>(record + kPlaneBytes)[word / kLanes] = make_float2(scale.scale(), float(sum));
        }
    }
};
