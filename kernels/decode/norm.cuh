// Norms of a token by one block, and gated activations of a vector, for kernels that write them in one order or another. They
// read and write fp16 or bf16 and compute in fp32; sums have a fixed order.
#pragma once
#include "decode.cuh"
#include "../shared/epilogue.cuh"

constexpr int kNormThreads = QK_NORM_THREADS;

// (x - mean) / sqrt(var + eps) * weight + bias of token blockIdx.x, or without a mean (kCentered = false) round(x / rms) *
// weight, as write(vector, values). With `addend`, x is first replaced by sum = round(x + addend), which is written too.
// x: written by the kernel before until the wait. K: a multiple of 8, at most kNormThreads * kVectors * 8. room: shared.
template <bool kCentered, int kDtype, int kVectors, class Write>
__device__ __forceinline__ void normToken(const uint16* x, const uint16* addend, const uint16* __restrict__ weight,
                                          const uint16* __restrict__ bias, uint16* __restrict__ sum, int K, float epsilon,
                                          float* room, const Write& write) {
    allowNextKernel();
    const int vectors = K / kVectorValues;
    uint4 scaleVectors[kVectors], shiftVectors[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {  // no kernel writes these
        const int vector = threadIdx.x + i * kNormThreads;
        const bool inside = vector < vectors;
        scaleVectors[i] = inside ? reinterpret_cast<const uint4*>(weight)[vector] : make_uint4(0, 0, 0, 0);
        shiftVectors[i] = inside && bias ? reinterpret_cast<const uint4*>(bias)[vector] : make_uint4(0, 0, 0, 0);
    }
    waitForPriorKernels();
    const size_t row = size_t(blockIdx.x) * K;
    uint4 raw[kVectors], addendRaw[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        const int vector = threadIdx.x + i * kNormThreads;
        const bool inside = vector < vectors;
        raw[i] = inside ? reinterpret_cast<const uint4*>(x + row)[vector] : make_uint4(0, 0, 0, 0);
        addendRaw[i] = make_uint4(0, 0, 0, 0);
        if (inside && addend) addendRaw[i] = reinterpret_cast<const uint4*>(addend + row)[vector];
    }
    float values[kVectors][kVectorValues];
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        const int vector = threadIdx.x + i * kNormThreads;
        unpack<kDtype>(raw[i], values[i]);
        if (addend) {
            float addends[kVectorValues];
            unpack<kDtype>(addendRaw[i], addends);
#pragma unroll
            for (int k = 0; k < kVectorValues; ++k) values[i][k] = rounded(values[i][k] + addends[k], kDtype);
            if (vector < vectors) reinterpret_cast<uint4*>(sum + row)[vector] = pack<kDtype>(values[i]);
        }
#pragma unroll
        for (int k = 0; k < kVectorValues; ++k) total += values[i][k];
    }
    const float mean = kCentered ? blockSum(total, room) / K : 0.0f;
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        if (threadIdx.x + i * kNormThreads < vectors) {
#pragma unroll
            for (int k = 0; k < kVectorValues; ++k) squares += (values[i][k] - mean) * (values[i][k] - mean);
        }
    }
    const float inverse = rsqrtf(blockSum(squares, room) / K + epsilon);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        const int vector = threadIdx.x + i * kNormThreads;
        if (vector < vectors) {
            float scales[kVectorValues], shifts[kVectorValues];
            unpack<kDtype>(scaleVectors[i], scales);
            unpack<kDtype>(shiftVectors[i], shifts);
#pragma unroll
            for (int k = 0; k < kVectorValues; ++k) {
                float normal = (values[i][k] - mean) * inverse;
                if (!kCentered) normal = rounded(normal, kDtype);
                values[i][k] = normal * scales[k] + shifts[k];
            }
            write(vector, pack<kDtype>(values[i]));
        }
    }
}

// round(activation(gate)) * up of eight values.
template <int kDtype>
__device__ __forceinline__ uint4 gatedVector(const uint16* gate, const uint16* up, int activation) {
    float gates[kVectorValues], values[kVectorValues];
    unpack<kDtype>(*reinterpret_cast<const uint4*>(gate), gates);
    unpack<kDtype>(*reinterpret_cast<const uint4*>(up), values);
    // silu, the usual one, stands here: eight calls run one after the other, and the row of one token has few warps to hide it.
    if (activation == kSilu) {
#pragma unroll
        for (int k = 0; k < kVectorValues; ++k) gates[k] = silu(gates[k]);
    } else {
#pragma unroll
        for (int k = 0; k < kVectorValues; ++k) gates[k] = activatedBy(gates[k], activation, kDtype);
    }
#pragma unroll
    for (int k = 0; k < kVectorValues; ++k) values[k] *= rounded(gates[k], kDtype);
    return pack<kDtype>(values);
}
