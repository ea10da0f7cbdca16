// From scores to the codes of P, and from sums of codes to the output: for mma.cu and its form on warpgroup
// products. Lane 4 g + t holds rows g and g + 8 of 16, and columns 8 i + 2 t, 8 i + 2 t + 1 of scores and sums.
#pragma once
#include "attention.cuh"

constexpr int kMinusInfinityBits = int(0xff800000u);
constexpr float kLog2Of127 = 6.98868468677216585f;
constexpr uint32 kOnes = 0x01010101u;

// The largest scores of whole rows: 0 for a row that sees no key, so that its codes become 0; NaN for one that has it.
template <int kRowTiles>
__device__ __forceinline__ void finishLargest(float (&largest)[kRowTiles][2], int bad) {
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; i++) {
        float& most = largest[i / 2][i % 2];
        most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, 1));
        most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, 2));
        if (__float_as_int(most) == kMinusInfinityBits) most = 0.f;  // sees no key: every code becomes 0
        if (bad >> i & 1) most = __uint_as_float(kNotANumberBits);
    }
}

// round(127 * 2^((score - largest) * exponentStep)) in the low byte.
__device__ __forceinline__ uint32 probabilityCode(int score, float largest, float exponentStep) {
    const float power = powerOf2(__fmaf_rn(__int_as_float(score) - largest, exponentStep, kLog2Of127));
    return __float_as_uint(__fadd_rn(power, kIntegerBase));
}

// The codes of four scores, the first in the low byte.
__device__ __forceinline__ uint32 probabilityWord(int a, int b, int c, int d, float largest, float exponentStep) {
    return packBytes(probabilityCode(a, largest, exponentStep), probabilityCode(b, largest, exponentStep),
                     probabilityCode(c, largest, exponentStep), probabilityCode(d, largest, exponentStep));
}

// Eight neighbouring dims of one row, aligned to 16 bytes.
__device__ __forceinline__ void storeRun(void* out, size_t index, const float (&y)[kRun], int dtype) {
    if (dtype == kFloat32) {
        uint4* run = reinterpret_cast<uint4*>(static_cast<float*>(out) + index);
#pragma unroll
        for (int i = 0; i < kRun; i += 4) {
            run[i / 4] = make_uint4(__float_as_uint(y[i]), __float_as_uint(y[i + 1]), __float_as_uint(y[i + 2]),
                                    __float_as_uint(y[i + 3]));
        }
    } else {
        uint32 pairs[kRun / 2];
#pragma unroll
        for (int i = 0; i < kRun / 2; i++) {
            pairs[i] = floatToShort(y[2 * i], dtype) | uint32(floatToShort(y[2 * i + 1], dtype)) << 16;
        }
        *reinterpret_cast<uint4*>(static_cast<uint16*>(out) + index) =
            make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
}

// Sums of codes to the output, by the sum of the codes of P. first: index of this lane's first row in the
// output, whose rows are `pitch` apart.
template <int kDim, int kRowTiles>
__device__ __forceinline__ void writeRows(void* out, const int (&sums)[kRowTiles][kDim / 8][4],
                                          const int (&total)[kRowTiles][2], const float (&largest)[kRowTiles][2],
                                          float valueStep, size_t first, int pitch, int row, int M, int valueDims,
                                          int dtype, int lane) {
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; i++) {
        const int r = i / 2, half = i % 2, m = row + 16 * r + 8 * half;
        int sum = total[r][half];
        sum += __shfl_xor_sync(kFullWarp, sum, 1);
        sum += __shfl_xor_sync(kFullWarp, sum, 2);
        float scale = sum == 0 ? 0.f : __fmul_rn(__frcp_rn(__int2float_rn(sum)), valueStep);
        if (largest[r][half] != largest[r][half]) scale = largest[r][half];
        const size_t start = first + size_t(m - row) * pitch;
#pragma unroll
        for (int run = 0; run < kDim / 32; run++) {
            const int dim = 32 * run + lane % 4 * kRun;
            float y[kRun];
#pragma unroll
            for (int n = 0; n < kRun; n++) {
                y[n] = __fmul_rn(__int2float_rn(sums[r][4 * run + n / 2][2 * half + n % 2]), scale);
            }
            if (m < M && dim < valueDims) storeRun(out, start + dim, y, dtype);
        }
    }
}
