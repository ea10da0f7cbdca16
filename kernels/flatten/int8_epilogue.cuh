// The epilogue of INT8 and INT4 products: sums to values of y, and these to memory.
//
//     y[m, n] = dot[m, n] * (actScale * weightScale[n]) + bias[n]       one rounding per operation, as ops/flatten/op.py
//
// Or with one weightScale for all features.
//
// Lane 4 g + t of a warp holds rows g and g + 8 of 16 rows of x, and columns 8 c + 2 t, 8 c + 2 t + 1 for every c.
// The row order of weight tiles (featureOfRow, planes.cuh) makes the eight values of four neighbouring c eight
// neighbouring features: one 16-byte store of two-byte elements, nothing exchanged.
#pragma once
#include "../bipolar/planes.cuh"

constexpr int kRunFeatures = 8;                 // neighbouring features of a thread
constexpr int kRunRows = kOrderRows;            // tile rows of W that they are among
constexpr int kRunDots = 2 * kRunFeatures;      // of a thread: two rows of x

// Where the products go.
struct Output {
    uint8* y;
    int M, N;
};

// What dot products become values with. weight: [N] if perRow, else [1].
struct Scales {
    float act;
    const float* weight;
    int perRow;
};

// Scale of one feature, 0 behind the last.
__device__ __forceinline__ float scaleOf(const Scales& scales, int n, int N) {
    return n < N ? __fmul_rn(scales.act, scales.weight[scales.perRow ? n : 0]) : 0.f;
}

// Bias of one feature, 0 behind the last; bias: [N] of ``dtype``, or null.
__device__ __forceinline__ float biasOf(const void* bias, int dtype, int n, int N) {
    return bias == nullptr || n >= N ? 0.f : loadElement(bias, n, dtype);
}

// y of one row of x and eight features, in fp32. dots[4 c + 2 half + e]: row m + 8 half, tile row 8 c + 2 t + e.
__device__ __forceinline__ void scaleRow(const int* dots, int half, const float (&scale)[kRunFeatures],
                                         const float (&bias)[kRunFeatures], float (&value)[kRunFeatures]) {
#pragma unroll
    for (int i = 0; i < kRunFeatures; i++) {
        value[i] = __fadd_rn(__fmul_rn(__int2float_rn(dots[i / 2 * 4 + 2 * half + i % 2]), scale[i]), bias[i]);
    }
}

// Eight neighbours as two-byte elements.
template <int kDtype>
__device__ __forceinline__ void packRow(const float (&value)[kRunFeatures], uint32* word) {
#pragma unroll
    for (int i = 0; i < kRunFeatures / 2; i++) {
        word[i] = floatToShort(value[2 * i], kDtype) | uint32(floatToShort(value[2 * i + 1], kDtype)) << 16;
    }
}

// Write 16 rows of x against 32 tile rows of W; dots as in scaleRow. m: this lane's first row; n: the first of its
// eight features; scale, bias: theirs. kWhole: all of it lies inside y, N % 8 == 0.
template <bool kWhole, int kDtype>
__device__ __forceinline__ void writeRun(const int* dots, const Output& out, const float (&scale)[kRunFeatures],
                                         const float (&bias)[kRunFeatures], int m, int n) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = m + 8 * half;
        const size_t index = size_t(row) * out.N + n;
        float value[kRunFeatures];
        scaleRow(dots, half, scale, bias, value);
        if constexpr (kWhole && kDtype != kFloat32) {
            uint32 word[kRunFeatures / 2];
            packRow<kDtype>(value, word);
            *reinterpret_cast<uint4*>(reinterpret_cast<uint16*>(out.y) + index) =
                make_uint4(word[0], word[1], word[2], word[3]);
        } else {
#pragma unroll
            for (int i = 0; i < kRunFeatures; i++) {
                if (kWhole || (row < out.M && n + i < out.N)) storeElement(out.y, index + i, value[i], kDtype);
            }
        }
    }
}

// Whether mCount tokens from m on and nCount features from n on can be written by whole runs.
__device__ __forceinline__ bool isWhole(const Output& out, int m, int mCount, int n, int nCount) {
    return m + mCount <= out.M && n + nCount <= out.N && out.N % kRunFeatures == 0;
}
