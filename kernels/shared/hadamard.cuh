// The rotation of formats/hadamard.py for a warp: a run of 256 columns, of which a lane has 8 neighbouring ones.
// Whoever includes this hands over QK_SIGNS_0 to QK_SIGNS_7.
#pragma once
#include "common.cuh"

constexpr int kHadamardColumns = 8;  // of a lane

// Bit i: whether column 8 lane + i of any run changes its sign. A byte of the table.
__device__ __forceinline__ uint32 hadamardSigns(int lane) {
    static constexpr uint32 kSigns[] = {QK_SIGNS_0, QK_SIGNS_1, QK_SIGNS_2, QK_SIGNS_3,
                                        QK_SIGNS_4, QK_SIGNS_5, QK_SIGNS_6, QK_SIGNS_7};
    constexpr int kLanesPerWord = kBitsPerWord / kHadamardColumns;
    uint32 signs = 0;
#pragma unroll
    for (int word = 0; word < 8; word++) {
        if (lane / kLanesPerWord == word) signs = kSigns[word];
    }
    return signs >> lane % kLanesPerWord * kHadamardColumns;
}

// v, whose signs are changed already, times the blocks, in place: steps between columns 1, 2, 4 apart are the lane's own,
// then 8 .. width / 2 apart lie in lanes 1 .. width / 16 apart, the upper one taking the difference. As
// formats/hadamard.py adds, so are the bits.
// width: of a block, 8 to 256. root: 1 / sqrt(width) rounded.
__device__ __forceinline__ void rotateRun(float (&v)[kHadamardColumns], int lane, int width, float root) {
#pragma unroll
    for (int distance = 1; distance < kHadamardColumns; distance *= 2) {
#pragma unroll
        for (int i = 0; i < kHadamardColumns; i++) {
            if (i & distance) continue;
            const float a = v[i], b = v[i + distance];
            v[i] = __fadd_rn(a, b);
            v[i + distance] = __fsub_rn(a, b);
        }
    }
    for (int distance = 1; distance < width / kHadamardColumns; distance *= 2) {
        const float sign = lane & distance ? -1.f : 1.f;  // a product with it is exact: one rounding, as of a sum
#pragma unroll
        for (int i = 0; i < kHadamardColumns; i++) {
            v[i] = __fmaf_rn(v[i], sign, __shfl_xor_sync(kFullWarp, v[i], distance));
        }
    }
#pragma unroll
    for (int i = 0; i < kHadamardColumns; i++) v[i] = __fmul_rn(v[i], root);
}
