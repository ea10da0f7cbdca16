// What every kernel shares: integer names, 16-bit float conversions, typed element access, warp reductions.
// No CUDA header is included anywhere, so the kernels compile with NVRTC alone.
#pragma once

using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;

constexpr int kWarpSize = 32;
constexpr int kBitsPerWord = 32;
constexpr int kBitsPerByte = 8;
constexpr unsigned kFullWarp = 0xffffffffu;
constexpr unsigned kNotANumberBits = 0x7fffffffu;

// Macros QK_* are constants of Python, handed over by the compiler's options: element types of quantkit/cuda/launch.py,
// those of quantkit/ops/constants.py, and those of a family from quantkit/ops/<family>/instances.py.
enum Dtype : int { kFloat16 = QK_FLOAT16, kBfloat16 = QK_BFLOAT16, kFloat32 = QK_FLOAT32 };

__device__ __forceinline__ float halfToFloat(uint16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ uint16 floatToHalf(float value) {
    uint16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ float bfloatToFloat(uint16 bits) { return __uint_as_float(uint32(bits) << 16); }

__device__ __forceinline__ uint16 floatToBfloat(float value) {
    uint16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// A 16-bit element of type kFloat16 or kBfloat16.
__device__ __forceinline__ float shortToFloat(uint16 bits, int dtype) {
    return dtype == kFloat16 ? halfToFloat(bits) : bfloatToFloat(bits);
}

__device__ __forceinline__ uint16 floatToShort(float value, int dtype) {
    return dtype == kFloat16 ? floatToHalf(value) : floatToBfloat(value);
}

__device__ __forceinline__ float loadElement(const void* base, size_t index, int dtype) {
    if (dtype == kFloat32) return static_cast<const float*>(base)[index];
    return shortToFloat(static_cast<const uint16*>(base)[index], dtype);
}

__device__ __forceinline__ void storeElement(void* base, size_t index, float value, int dtype) {
    if (dtype == kFloat32) {
        static_cast<float*>(base)[index] = value;
    } else {
        static_cast<uint16*>(base)[index] = floatToShort(value, dtype);
    }
}

// Sum over the lanes that differ in the bits from kFirst up to (not including) kEnd of the lane number; every lane
// gets it, and the order of the additions is fixed.
template <int kFirst, int kEnd>
__device__ __forceinline__ float laneSum(float value) {
#pragma unroll
    for (int mask = kFirst; mask < kEnd; mask *= 2) value += __shfl_xor_sync(kFullWarp, value, mask);
    return value;
}

// Word i of lane t of each four neighbouring lanes for word t of lane i. t: lane % 4.
__device__ __forceinline__ void exchangeInQuad(uint32 (&word)[4], int t) {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
        const bool upper = t & bit;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint32 &low = word[bit == 1 ? 2 * i : i], &high = word[bit == 1 ? 2 * i + 1 : i + 2];
            const uint32 got = __shfl_xor_sync(kFullWarp, upper ? low : high, bit);
            if (upper) low = got;
            else high = got;
        }
    }
}
