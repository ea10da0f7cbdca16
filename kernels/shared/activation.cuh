// Activation functions between two Linears, with the arithmetic of torch's kernels (quantkit/ops/activations.py).
//
// kGelu, kGeluTanh and kSilu are one kernel of torch: fp32 throughout, one rounding at the end; kSilu is by other instructions.
// kGeluNew and kGeluFast are written in Python by transformers (GPT-2; BLOOM), an operation at a time: every one rounds to the
// model's type.
#pragma once
#include "common.cuh"

enum Activation : int {
    kRelu = QK_RELU,
    kGelu = QK_GELU,
    kGeluTanh = QK_GELU_TANH,
    kSilu = QK_SILU,
    kGeluNew = QK_GELU_NEW,
    kGeluFast = QK_GELU_FAST
};

__device__ __forceinline__ float rounded(float value, int dtype) {
    return shortToFloat(floatToShort(value, dtype), dtype);
}

// x (1 + tanh(u)) / 2 for the three forms of u that are in use.
template <int kKind>
__device__ __forceinline__ float tanhGelu(float x, int dtype) {
    constexpr float kSlope = 0.79788456080286535588f;  // sqrt(2 / pi)
    constexpr float kCubic = 0.044715f;
    const auto step = [&](float value) { return kKind == kGeluTanh ? value : rounded(value, dtype); };
    float u;
    if constexpr (kKind == kGeluTanh) {
        u = __fmul_rn(kSlope, __fmaf_rn(kCubic, __fmul_rn(__fmul_rn(x, x), x), x));  // contracted as nvcc does
    } else if constexpr (kKind == kGeluNew) {
        const float cube = step(__fmul_rn(step(__fmul_rn(x, x)), x));
        u = step(__fmul_rn(kSlope, step(__fadd_rn(x, step(__fmul_rn(kCubic, cube))))));
    } else {
        const float square = step(__fmul_rn(step(__fmul_rn(kCubic, x)), x));
        u = step(__fmul_rn(step(__fmul_rn(kSlope, x)), step(__fadd_rn(1.f, square))));
    }
    return __fmul_rn(step(__fmul_rn(0.5f, x)), step(__fadd_rn(1.f, step(tanhf(u)))));
}

// x / (1 + e^-x), power and reciprocal by the units for such: two instructions each in the place of nine, and registers carry it
// in every loop. Below -87 it is 0. At most two results of a thousand are the neighbour of the nearest 16-bit number.
__device__ __forceinline__ float silu(float x) {
    constexpr float kLog2E = 1.44269504088896340736f;
    float power, inverse;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-kLog2E * x));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.f + power));
    return x * inverse;
}

// The function of one number of the model's type, before the last rounding.
template <int kKind>
__device__ __forceinline__ float activated(float x, int dtype) {
    if constexpr (kKind == kGelu) {
        constexpr float kRootHalf = 0.70710678118654752440f;
        return __fmul_rn(__fmul_rn(x, 0.5f), __fadd_rn(1.f, erff(__fmul_rn(x, kRootHalf))));
    } else if constexpr (kKind == kSilu) {
        return silu(x);
    } else {
        return tanhGelu<kKind>(x, dtype);
    }
}

// Two elements at a time: the larger of each and 0, and 0 for NaN.
template <int kDtype>
__device__ __forceinline__ uint32 reluPair(uint32 word) {
    if constexpr (kDtype == kFloat16) {
        asm("max.f16x2 %0, %0, %1;" : "+r"(word) : "r"(0u));
    } else {
        asm("max.bf16x2 %0, %0, %1;" : "+r"(word) : "r"(0u));
    }
    return word;
}

// Elements of the model's type, two a word, in place.
template <int kKind, int kDtype, int kWords>
__device__ __forceinline__ void activateBy(uint32 (&word)[kWords]) {
    constexpr int kAtOnce = 2;  // words, enough to overlap their latencies; more would only be more code
    static_assert(kWords % kAtOnce == 0, "every pass has as many words");
#pragma unroll 1
    for (int pass = 0; pass < kWords / kAtOnce; pass++) {  // registers cannot be indexed, so they rotate
        uint32 done[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) {
            const float low = activated<kKind>(shortToFloat(uint16(word[i]), kDtype), kDtype);
            const float high = activated<kKind>(shortToFloat(uint16(word[i] >> 16), kDtype), kDtype);
            done[i] = floatToShort(low, kDtype) | uint32(floatToShort(high, kDtype)) << 16;
        }
#pragma unroll
        for (int i = 0; i < kWords - kAtOnce; i++) word[i] = word[i + kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) word[kWords - kAtOnce + i] = done[i];
    }
}

template <int kDtype, int kWords>
__device__ __forceinline__ void activate(uint32 (&word)[kWords], int kind) {
    switch (kind) {
        case kRelu:
#pragma unroll
            for (int i = 0; i < kWords; i++) word[i] = reluPair<kDtype>(word[i]);
            return;
        case kGelu: return activateBy<kGelu, kDtype>(word);
        case kGeluTanh: return activateBy<kGeluTanh, kDtype>(word);
        case kSilu: return activateBy<kSilu, kDtype>(word);
        case kGeluNew: return activateBy<kGeluNew, kDtype>(word);
        default: return activateBy<kGeluFast, kDtype>(word);
    }
}
