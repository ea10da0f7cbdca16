// Arithmetic on pairs of 16-bit floats in a register.
#pragma once
#include "common.cuh"

// Two floats as a pair of 16-bit ones of type kDtype; the sum and the product of two such pairs, and a b + c.
template <int kDtype>
__device__ __forceinline__ uint32 packPair(float low, float high) {
    uint32 pair;
    if constexpr (kDtype == kFloat16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
template <int kDtype>
__device__ __forceinline__ uint32 addPairs(uint32 a, uint32 b) {
    uint32 sum;
    if constexpr (kDtype == kFloat16) {
        asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
    } else {  // compute capability 8.0 has no addition of bf16
        asm("{.reg .b32 one;\nmov.b32 one, 0x3f803f80;\nfma.rn.bf16x2 %0, %1, one, %2;\n}"
            : "=r"(sum) : "r"(a), "r"(b));
    }
    return sum;
}

template <int kDtype>
__device__ __forceinline__ uint32 multiplyAddPairs(uint32 a, uint32 b, uint32 c) {
    uint32 sum;
    if constexpr (kDtype == kFloat16) asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    else asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
}
template <int kDtype>
__device__ __forceinline__ uint32 multiplyPairs(uint32 a, uint32 b) {
    if constexpr (kDtype != kFloat16) return multiplyAddPairs<kDtype>(a, b, 0x80008000u);  // -0; 8.0 has no product of bf16
    uint32 product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

// (word and mask) or bits, as one instruction.
__device__ __forceinline__ uint32 maskedOr(uint32 word, uint32 mask, uint32 bits) {
    uint32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(word), "r"(mask), "r"(bits));
    return result;
}
