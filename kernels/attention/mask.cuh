// Which keys a row of Q sees, for mma.cu: those that exist, with `causal` those up to its own, and those of the mask.
#pragma once
#include "rows.cuh"

constexpr int kKeyTiles = kStepKeys / 8;              // products of eight keys per step
constexpr int kBoolMask = QK_BOOL_MASK;               // element types of the mask: Dtype, or this

// What keys a row sees. Strides in elements; scoreUnit: the value of one in Q K^T.
struct Visible {
    const void* mask;
    float scoreUnit;
    int batchStride, headStride, rowStride, keyStride, dtype, M, T, causal;
};

// Scores under the mask. row, key: this lane's first. Every row passes through the first row's registers, so that the
// loop's body stands in the code once and its addresses need few registers. A mask that is added takes the scores as they are in
// the formula; under any other they stay integers above kIntegerBase.
template <int kRowTiles>
__device__ __forceinline__ void applyMask(int (&s)[kRowTiles][kKeyTiles][4], const Visible& visible, int row, int key) {
    size_t at = size_t(blockIdx.z) * visible.batchStride + size_t(blockIdx.y) * visible.headStride +
                size_t(row) * visible.rowStride + size_t(key) * visible.keyStride;
#pragma unroll 1
    for (int i = 0; i < 2 * kRowTiles; i++) {
#pragma unroll
        for (int n = 0; n < 2 * kKeyTiles; n++) {
            const int ahead = n / 2 * 8 + n % 2;
            int score = s[0][n / 2][n % 2];
            if (row + 8 * i < visible.M && key + ahead < visible.T) {
                const size_t index = at + size_t(ahead) * visible.keyStride;
                if (visible.dtype == kBoolMask) {
                    if (static_cast<const uint8*>(visible.mask)[index] == 0) score = kMinusInfinityBits;
                } else {
                    const float units = __fsub_rn(__int_as_float(score), kIntegerBase);
                    const float added = loadElement(visible.mask, index, visible.dtype);
                    score = __float_as_int(__fadd_rn(__fmul_rn(units, visible.scoreUnit), added));
                }
            }
#pragma unroll
            for (int j = 0; j < 2 * kRowTiles - 1; j++) {
                s[j / 2][n / 2][j % 2 * 2 + n % 2] = s[(j + 1) / 2][n / 2][(j + 1) % 2 * 2 + n % 2];
            }
            s[kRowTiles - 1][n / 2][2 + n % 2] = score;
        }
        at += 8 * size_t(visible.rowStride);
    }
}

// Scores with -inf for keys that a row does not see.
template <int kRowTiles>
__device__ __forceinline__ void hide(int (&s)[kRowTiles][kKeyTiles][4], const Visible& visible, int row, int key) {
#pragma unroll
    for (int n = 0; n < kRowTiles * kKeyTiles * 4; n++) {
        const int m = row + n / (kKeyTiles * 4) * 16 + n % 4 / 2 * 8, t = key + n / 4 % kKeyTiles * 8 + n % 2;
        const bool seen = t < visible.T && (!visible.causal || t <= m + visible.T - visible.M);
        if (!seen) s[n / (kKeyTiles * 4)][n / 4 % kKeyTiles][n % 4] = kMinusInfinityBits;
    }
    if (visible.mask != nullptr) applyMask(s, visible, row, key);
}

// Whether some of 32 keys are not seen by some of a warp's rows, or a mask has to be asked.
__device__ __forceinline__ bool needsHiding(const Visible& visible, int row0, int key0) {
    const int last = key0 + kStepKeys - 1;
    return visible.mask != nullptr || last >= visible.T || (visible.causal && last > row0 + visible.T - visible.M);
}
