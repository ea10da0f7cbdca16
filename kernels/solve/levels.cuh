// The levels of a group of one row: sums of its scales under every pattern of signs, and the offset.
#pragma once
#include "../shared/common.cuh"

// value with its sign turned where bit `bit` of the code is not set: value * (2 sign - 1).
__device__ __forceinline__ float signedBy(float value, uint32 code, int bit) { return code >> bit & 1 ? value : -value; }

// Scales and offset of the group that a row has, in registers.
template <int kBits>
struct RowCode {
    float scales[kBits], offset;

    // scales: the first plane's; those of the others follow planeStride apart.
    __device__ __forceinline__ void load(const float* scalesOfRow, int planeStride, float offsetOfRow) {
#pragma unroll
        for (int bit = 0; bit < kBits; ++bit) scales[bit] = scalesOfRow[size_t(bit) * planeStride];
        offset = offsetOfRow;
    }

    // Planes are added from the lowest bit up, the offset last, as dequantize does.
    __device__ __forceinline__ float level(uint32 code) const {
        float sum = 0.0f;
#pragma unroll
        for (int bit = 0; bit < kBits; ++bit) sum += signedBy(scales[bit], code, bit);
        return sum + offset;
    }
};

// Rank of the nearest of 2^kBits rising levels: how many middles between neighbours are smaller than the value.
// middle(i): between the levels i and i + 1.
template <int kBits, class Middle>
__device__ __forceinline__ int nearestRank(float value, Middle middle) {
    int rank = 0;
#pragma unroll
    for (int bit = kBits - 1; bit >= 0; --bit) {
        if (value > middle(rank + (1 << bit) - 1)) rank += 1 << bit;
    }
    return rank;
}

// A thread's own table of rising levels and their codes: entry i at [i * kStride], so that threads side by side never
// meet in a bank of shared memory.
template <int kBits, int kStride>
struct LevelTable {
    static constexpr int kLevels = 1 << kBits;
    float* levels;  // [kLevels] kStride apart
    uint8* codes;   // likewise

    // Plane after plane: the levels so far, less the scale and plus it, are two rising rows, which are merged from
    // their upper ends in place. The row with the scale added is never longer than the other, so what is written
    // stands behind all that is still to be read, also where a level is no number.
    __device__ __forceinline__ void make(const RowCode<kBits>& code) {
        levels[0] = 0.0f;
        codes[0] = 0;
        int count = 1;
        for (int bit = 0; bit < kBits; ++bit) {
            float scale = code.scales[0];
#pragma unroll
            for (int other = 1; other < kBits; ++other) scale = bit == other ? code.scales[other] : scale;
            const float size = fabsf(scale);
            const int plus = scale >= 0.0f ? 1 << bit : 0, minus = (1 << bit) - plus;
            int below = count - 1, above = count - 1;  // the largest that are left of either row
            for (int i = 2 * count - 1; i >= 0; --i) {
                const float low = levels[below * kStride] - size;
                const float high = above >= 0 ? levels[above * kStride] + size : low;
                const bool takesHigh = above >= 0 && (above == below || high >= low);
                const int from = takesHigh ? above-- : below--;
                const int mark = takesHigh ? plus : minus;
                codes[i * kStride] = codes[from * kStride] | uint8(mark);
                levels[i * kStride] = takesHigh ? high : low;
            }
            count *= 2;
        }
        for (int i = 0; i < kLevels; ++i) levels[i * kStride] += code.offset;
    }

    __device__ __forceinline__ int nearest(float value) const {
        return nearestRank<kBits>(value, [&](int i) { return (levels[(i + 1) * kStride] + levels[i * kStride]) / 2; });
    }
};

// The rising levels of a group, their codes and the middles between neighbours, in shared memory of a warp.
template <int kBits>
struct WarpLevels {
    static constexpr int kLevels = 1 << kBits;
    float levels[kLevels], middles[kLevels];
    uint8 codes[kLevels];

    // Every lane counts the levels below its own; equal ones keep the order of their codes.
    __device__ __forceinline__ void make(const RowCode<kBits>& code, int lane) {
        for (int i = lane; i < kLevels; i += kWarpSize) middles[i] = code.level(i);
        __syncwarp();
        for (int i = lane; i < kLevels; i += kWarpSize) {
            const float own = middles[i];
            int rank = 0;
#pragma unroll 8
            for (int j = 0; j < kLevels; ++j) rank += middles[j] < own || (middles[j] == own && j < i);
            levels[rank] = own;
            codes[rank] = uint8(i);
        }
        __syncwarp();
        for (int i = lane; i < kLevels - 1; i += kWarpSize) middles[i] = (levels[i + 1] + levels[i]) / 2;
        __syncwarp();
    }

    __device__ __forceinline__ int nearest(float value) const {
        return nearestRank<kBits>(value, [&](int i) { return middles[i]; });
    }
};
