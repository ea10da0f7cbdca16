// Activations as 16-bit fixed-point codes, what planes.cuh and bytes.cuh share.
//
// A segment of kSegment columns of x shares the power of two s that brings its largest element below 2^15:
//   x[k] ~ s * c[k],  c[k] = round(x[k] / s)
// so an element is exact where its last mantissa bit is at least s, that is within a factor 2^4 (fp16) or 2^7 (bf16)
// of the segment's largest; below that its error is at most s / 2 = 2^-15 of the largest.
// Zero segments have s = 0; a segment with an Inf or NaN has s = NaN, so every output that reads it is NaN.
// bf16 segments whose largest element is below 2^-112 keep fewer bits.
#pragma once
#include "tiles.cuh"
#include "../shared/mma.cuh"

constexpr int kValuesPerThread = kBitsPerWord;  // one word of a tile row
constexpr int kValuePairs = kValuesPerThread / 2;
constexpr int kVectorValues = 8;                // 16-bit elements per 16-byte load

constexpr uint32 kExponentShift = 23;
constexpr uint32 kInfiniteExponent = 255;
constexpr uint32 kSmallestExponent = 15;        // keeps s = 2^(exponent - 127 - 14) a normal number
constexpr uint32 kCodeBits = 14;                // largest code: below 2^15
constexpr uint32 kInverseBias = 2 * 127 + kCodeBits;
constexpr float kRoundToInteger = 12582912.0f;  // 1.5 * 2^23: the float whose low bits count in ones
constexpr uint32 kRoundToIntegerBits = 0x4b400000;

// What the elements of a segment are divided by: s = 2^(exponent - 127 - 14).
struct SegmentScale {
    uint32 exponent;
    bool finite, zero;

    // Elements that are not finite get any code: the scale makes it NaN.
    __device__ __forceinline__ float inverse() const {
        return __uint_as_float((kInverseBias - exponent) << kExponentShift);
    }
    __device__ __forceinline__ float scale() const {
        const float zeroOrScale = zero ? 0.0f : __uint_as_float((exponent - kCodeBits) << kExponentShift);
        return finite ? zeroOrScale : __uint_as_float(kNotANumberBits);
    }
};

// The scale of the segment whose columns kLanes neighbouring lanes hold. largest: of the lane's magnitudes, the bits of a
// float. kExcess: mantissas from 2 - kExcess * 2^-23 on count as 2, so that codes end that much earlier. Whole warps
// call it.
template <int kLanes, uint32 kExcess>
__device__ __forceinline__ SegmentScale segmentScale(uint32 largest) {
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2) largest = max(largest, __shfl_xor_sync(kFullWarp, largest, mask));
    const bool finite = largest < kInfiniteExponent << kExponentShift;
    return {max((largest + kExcess) >> kExponentShift, kSmallestExponent), finite, largest == 0};
}

// Sum over the kLanes neighbouring lanes of a segment.
template <int kLanes>
__device__ __forceinline__ int segmentSum(int value) {
#pragma unroll
    for (int mask = 1; mask < kLanes; mask *= 2) value += __shfl_xor_sync(kFullWarp, value, mask);
    return value;
}

// 32 elements of x from `x` on, two a register, of which `present` are there; zeros for the others.
__device__ __forceinline__ void loadPairs(const uint16* x, int present, bool vectors, uint32 (&pairs)[kValuePairs]) {
    if (vectors) {  // present is a multiple of 8 and x is 16-byte aligned: a vector is inside or outside
#pragma unroll
        for (int v = 0; v < kValuesPerThread / kVectorValues; ++v) {
            uint4 raw = make_uint4(0, 0, 0, 0);
            if (v * kVectorValues < present) raw = *reinterpret_cast<const uint4*>(x + v * kVectorValues);
            pairs[4 * v] = raw.x, pairs[4 * v + 1] = raw.y, pairs[4 * v + 2] = raw.z, pairs[4 * v + 3] = raw.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < kValuePairs; ++i) {
            const uint32 low = 2 * i < present ? x[2 * i] : 0, high = 2 * i + 1 < present ? x[2 * i + 1] : 0;
            pairs[i] = low | high << 16;
        }
    }
}

template <int kDtype>
__device__ __forceinline__ void pairsToFloats(const uint32 (&pairs)[kValuePairs], float (&values)[kValuesPerThread]) {
#pragma unroll
    for (int i = 0; i < kValuePairs; ++i) {
        values[2 * i] = shortToFloat(uint16(pairs[i]), kDtype);
        values[2 * i + 1] = shortToFloat(uint16(pairs[i] >> 16), kDtype);
    }
}

// The largest magnitude as the bits of a float; as bits NaN > Inf > every number.
template <int kDtype>
__device__ __forceinline__ uint32 largestMagnitude(const uint32 (&pairs)[kValuePairs]) {
    constexpr int kChains = 4;  // one would wait for itself at every step
    uint32 most[kChains] = {};
#pragma unroll
    for (int i = 0; i < kValuePairs; ++i) most[i % kChains] = largerMagnitudes<kDtype>(most[i % kChains], pairs[i]);
#pragma unroll
    for (int i = 1; i < kChains; ++i) most[0] = largerMagnitudes<kDtype>(most[0], most[i]);
    const float low = shortToFloat(uint16(most[0]), kDtype), high = shortToFloat(uint16(most[0] >> 16), kDtype);
    return __float_as_uint(largerMagnitude(low, high));
}

// 32 elements of a lane, and the largest of their magnitudes as the bits of a float.
struct Elements {
    float values[kValuesPerThread];
    uint32 largest;

    template <int kDtype>
    __device__ __forceinline__ void take(const uint32 (&pairs)[kValuePairs]) {
        largest = largestMagnitude<kDtype>(pairs);
        pairsToFloats<kDtype>(pairs, values);
    }
};

// Which part of x records are made of.
struct Activations {
    int tokens;
    int k, K;            // the first record's first column; those of x: zeros behind the last
    int dtype, vectors;  // vectors: every row of x is 16-byte aligned and K is a multiple of 8
    bool loaded;         // each thread has its first word
};

// 32 elements of x as they come from memory.
struct RawWord {
    uint32 pairs[kValuePairs];
};

// Records of `words` words per token of x, by all threads of the block. raw: word number threadIdx.x of the one token,
// where part.loaded; the caller asks for it ahead of what would keep it waiting. setBytes: from the records of a set of
// kSetTokens tokens, which share theirs, to the next set's. Not inlined: it runs once per pass, and the caller's loops keep
// their registers.
template <class Record, int kTokens, int kSetTokens>
__device__ __noinline__ void makeRecords(const uint16* x, Activations part, int words, unsigned char* records,
                                         uint32 setBytes, RawWord raw) {
    // Blocks have about as many threads as one or two tokens have words: subtracting is shorter than a division.
    int token = 0, word = threadIdx.x;
    auto findToken = [&] {
        while (kTokens > 1 && word >= words && token < part.tokens) word -= words, ++token;
    };
    auto present = [&] { return kTokens == 1 ? word < words : token < part.tokens; };
    auto load = [&] {
        const int k = part.k + word * kBitsPerWord;
        loadPairs(x + uint32(token * part.K) + k, present() ? part.K - k : 0, part.vectors, raw.pairs);
    };
    findToken();
    if (!part.loaded) load();
    const int all = words * part.tokens;
    for (int start = threadIdx.x / kWarpSize * kWarpSize; start < all; start += blockDim.x) {
        Elements elements;
        if (part.dtype == kFloat16) elements.take<kFloat16>(raw.pairs);
        else elements.take<kBfloat16>(raw.pairs);
        const uint32 ownToken = token, ownWord = word;
        const bool valid = present();
        word += blockDim.x;
        findToken();
        if (start + int(blockDim.x) < all) load();  // the next elements, while these are worked on
        unsigned char* record = records + ownToken / kSetTokens * setBytes + ownWord / kWordsPerTileRow * Record::kBytes;
        Record::write(elements, ownWord % kWordsPerTileRow, valid, record, ownToken % kSetTokens);
    }
}
