// What the small kernels between the products of one decoding step share: 16-byte vectors of fp16 or bf16 as floats, and
// sums over a block in a fixed order.
#pragma once
#include "../shared/common.cuh"
#include "../shared/mma.cuh"

constexpr int kVectorValues = QK_VECTOR_VALUES;  // 16-bit elements per 16-byte access

template <int kDtype>
__device__ __forceinline__ void unpack(const uint4& raw, float (&values)[kVectorValues]) {
    const uint32 pairs[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        values[2 * i] = shortToFloat(uint16(pairs[i]), kDtype);
        values[2 * i + 1] = shortToFloat(uint16(pairs[i] >> 16), kDtype);
    }
}

template <int kDtype>
__device__ __forceinline__ uint4 pack(const float (&values)[kVectorValues]) {
    uint32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        pairs[i] = floatToShort(values[2 * i], kDtype) | uint32(floatToShort(values[2 * i + 1], kDtype)) << 16;
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Sum over the block; every thread gets it. `room`: one float per warp, free again at the next call's barrier.
__device__ __forceinline__ float blockSum(float value, float* room) {
    const int lane = threadIdx.x % kWarpSize, warps = blockDim.x / kWarpSize;
    value = laneSum<1, kWarpSize>(value);
    __syncthreads();
    if (lane == 0) room[threadIdx.x / kWarpSize] = value;
    __syncthreads();
    return laneSum<1, kWarpSize>(lane < warps ? room[lane] : 0.0f);
}
