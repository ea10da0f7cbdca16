// The epilogue of gemm_wgmma.cu: a tile's sums to values of y, and these to memory.
//
// A thread 32 w + 4 g + t of a consumer warpgroup holds rows 16 w + g and 16 w + g + 8 of operand A, and rows
// 8 c + 2 t, 8 c + 2 t + 1 of operand B for every c. Where B is W, the row order of weight tiles (featureOfRow) makes
// the eight values of four neighbouring c eight neighbouring features: one or two 16-byte stores, nothing exchanged.
// Where A is W they are one feature of many tokens, and go through shared memory.
#pragma once
#include "planes.cuh"
#include "../shared/wgmma.cuh"

constexpr int kRunFeatures = 8;                   // neighbouring features of a thread
constexpr int kRunRows = kOrderRows;               // rows of B that they are among
constexpr int kSlabTokens = QK_SLAB_TOKENS, kSlabFeatures = kWgmmaRows;
constexpr int kSlabPadding = QK_SLAB_PADDING;     // bytes between rows of a slab: no bank conflicts

// What the recovery needs to know of one row of an operand; of a token with a zero point z also 2 z.
template <bool kZero>
struct alignas(16) LineOf {
    int term;
    float scale;
    float bias;
};
template <>
struct alignas(16) LineOf<true> {
    int term;
    float scale;
    float bias;
    int twiceZero;
};

// The product's integer from the sum of products of codes, of a row of A and one of B. kSwap: A is W.
template <bool kZero, bool kSwap>
__device__ __forceinline__ int integerOf(int dot, const LineOf<kZero>& a, const LineOf<kZero>& b) {
    if constexpr (!kZero) {
        return 4 * dot + a.term + b.term;
    } else if constexpr (kSwap) {
        return 4 * dot + a.term * b.twiceZero + b.term;
    } else {
        return 4 * dot + a.term + b.term * a.twiceZero;
    }
}

// v as a float. Conversions run at a fraction of the rate of additions, so small values take the bits of 1.5 * 2^23
// instead, which tokenTerm then carries (kSmallBits): exact up to |v| = 2^22. multiply() sees to that.
constexpr int kSmallBits = 0x4B400000;
template <bool kSmall>
__device__ __forceinline__ float valueOf(int v) {
    return kSmall ? __fadd_rn(__int_as_float(v), -12582912.f) : __int2float_rn(v);
}

// Add the levels up into the first, and do it here: left to the compiler, additions move down to their uses and every
// level's registers stay taken while the lines are loaded.
template <int kLevels, int kAccumulators>
__device__ __forceinline__ void mergeLevels(int* sums) {
#pragma unroll
    for (int i = 0; i < kAccumulators; i++) {
#pragma unroll
        for (int level = 1; level < kLevels; level++) sums[i] += sums[level * kAccumulators + i] << level;
        asm volatile("" : "+r"(sums[i]));
    }
}

// The tile of this warpgroup: the output, its first token and feature.
struct Place {
    uint8* y;
    int m, n, M, N;
};

constexpr int elementBytes(int dtype) { return dtype == kFloat32 ? 4 : 2; }
constexpr int slabRowBytes(int dtype) { return kSlabFeatures * elementBytes(dtype) + kSlabPadding; }
constexpr int slabBytes(bool swap, int dtype) { return swap ? kSlabTokens * slabRowBytes(dtype) : 0; }

// Eight 16-bit values of one token at neighbouring features, where they are inside y.
template <int kDtype>
__device__ __forceinline__ void storeRun(bool inside, uint8* y, size_t index, const float (&value)[kRunFeatures]) {
    uint32 word[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        word[i] = floatToShort(value[2 * i], kDtype) | uint32(floatToShort(value[2 * i + 1], kDtype)) << 16;
    }
    store16If(inside, reinterpret_cast<uint16*>(y) + index, word[0], word[1], word[2], word[3]);
}

// B is W. kRuns: N is a multiple of eight, so every thread stores runs of eight features of its two tokens, all inside
// or all outside y; else, and in fp32, one element at a time.
template <bool kRuns, bool kSmall, int kRowsB, int kDtype, bool kZero>
__device__ __forceinline__ void writeRuns(const int* dots, const LineOf<kZero>* linesA, const LineOf<kZero>* linesB,
                                          const Place& p, int thread) {
    const int lane = thread % kWarpSize, t = lane % 4, row = thread / kWarpSize * 16 + lane / 4;
    const LineOf<kZero> a[2] = {linesA[row], linesA[row + 8]};
#pragma unroll
    for (int start = 0; start < kRowsB; start += kRunRows) {
        const int n = p.n + start + kRunFeatures * t, m = p.m + row;
        const size_t index[2] = {size_t(m) * p.N + n, size_t(m + 8) * p.N + n};
        float value[2][kRunFeatures];
#pragma unroll
        for (int i = 0; i < kRunFeatures; i++) {
            const int c = i / 2, e = i % 2;
            const LineOf<kZero> b = linesB[start + 8 * c + 2 * t + e];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int dot = dots[(start / 8 + c) * 4 + 2 * half + e];
                const int v = integerOf<kZero, false>(dot, a[half], b);
                value[half][i] = scaled(valueOf<kSmall>(v), a[half].scale, b.scale, b.bias);
                if (kRuns || m + 8 * half >= p.M || n + i >= p.N) continue;
                storeElement(p.y, index[half] + i, value[half][i], kDtype);
            }
        }
        if constexpr (kRuns) {
            storeRun<kDtype>(n < p.N && m < p.M, p.y, index[0], value[0]);
            storeRun<kDtype>(n < p.N && m + 8 < p.M, p.y, index[1], value[1]);
        }
    }
}

// A is W: 32 tokens at a time through a slab [token][feature] of shared memory, then rows of features to y.
template <bool kSmall, int kRowsB, int kDtype, bool kZero>
__device__ __forceinline__ void writeSlabs(const int* dots, const LineOf<kZero>* linesA, const LineOf<kZero>* linesB,
                                           const Place& p, uint8* slab, int thread, int barrier) {
    constexpr int kElement = elementBytes(kDtype), kRowBytes = slabRowBytes(kDtype);
    constexpr int kPerChunk = kChunkBytes / kElement, kChunks = kSlabFeatures / kPerChunk;
    const int lane = thread % kWarpSize, t = lane % 4, row = thread / kWarpSize * 16 + lane / 4;
    const LineOf<kZero> a[2] = {linesA[row], linesA[row + 8]};
#pragma unroll
    for (int start = 0; start < kRowsB; start += kSlabTokens) {
        namedSync(barrier, kWarpgroup);  // all have copied the slab before
#pragma unroll
        for (int i = 0; i < kSlabTokens / 4; i++) {
            const int rowB = i / 2 * 8 + 2 * t + i % 2;
            const LineOf<kZero> b = linesB[start + rowB];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int dot = dots[(start / 8 + i / 2) * 4 + 2 * half + i % 2];
                const int v = integerOf<kZero, true>(dot, a[half], b);
                const float value = scaled(valueOf<kSmall>(v), a[half].scale, b.scale, a[half].bias);
                storeElement(slab + rowB * kRowBytes, featureOfRow(row + 8 * half), value, kDtype);
            }
        }
        namedSync(barrier, kWarpgroup);
        const int n = p.n + thread % kChunks * kPerChunk;
#pragma unroll
        for (int token = thread / kChunks; token < kSlabTokens; token += kWarpgroup / kChunks) {
            if (p.m + start + token >= p.M || n >= p.N) continue;
            const uint8* from = slab + token * kRowBytes + thread % kChunks * kChunkBytes;
            uint8* to = p.y + (size_t(p.m + start + token) * p.N + n) * kElement;
            if (p.N % kPerChunk == 0) {  // then feature + kPerChunk <= N
                *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
                continue;
            }
            for (int e = 0; e < min(kPerChunk, p.N - n) * kElement; e += 2) {
                *reinterpret_cast<uint16*>(to + e) = *reinterpret_cast<const uint16*>(from + e);
            }
        }
    }
}
