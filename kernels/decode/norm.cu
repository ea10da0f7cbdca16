// Norms and gated activations of one decoding step. They read and write fp16 or bf16 and compute in fp32; sums have a
// fixed order.
#include "decode.cuh"
#include "../shared/epilogue.cuh"

namespace {

constexpr int kNormThreads = QK_NORM_THREADS;
constexpr int kGatedThreads = QK_GATED_THREADS;

}  // namespace

// y = (x - mean) / sqrt(var + eps) * weight + bias, or without a mean (kCentered = false) y = round(x / rms) * weight.
// With `addend`, x is first replaced by sum = round(x + addend), which is written too.
// Grid: one block per token. K: a multiple of 8, at most kNormThreads * kVectors * 8.
template <bool kCentered, int kDtype, int kVectors>
__global__ void __launch_bounds__(kNormThreads)
decodeNorm(const uint16* x,                    // [M, K]; written until the wait, so not __restrict__
           const uint16* addend,               // [M, K], or null with sum
           const uint16* __restrict__ weight,  // [K]
           const uint16* __restrict__ bias,    // [K], or null
           uint16* __restrict__ sum,           // [M, K]
           uint16* __restrict__ y,             // [M, K]
           int K, float epsilon) {
    __shared__ float room[kNormThreads / kWarpSize];
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
            reinterpret_cast<uint4*>(y + row)[vector] = pack<kDtype>(values[i]);
        }
    }
}

// y = round(activation(gate)) * up.
template <int kDtype>
__global__ void __launch_bounds__(kGatedThreads)
decodeGated(const uint16* gate,  // [rows, count / rows], a multiple of 8 each
            const uint16* up,    // the same
            uint16* y,           // the same, contiguous
            int count, int width, int gateStride, int upStride,  // of a row, and from one to the next
            int activation) {
    allowNextKernel();
    waitForPriorKernels();
    const int vector = blockIdx.x * kGatedThreads + threadIdx.x;
    if (vector >= count / kVectorValues) return;
    float gates[kVectorValues], values[kVectorValues];
    const int row = vector * kVectorValues / width, column = vector - row * (width / kVectorValues);
    unpack<kDtype>(reinterpret_cast<const uint4*>(gate + size_t(row) * gateStride)[column], gates);
    unpack<kDtype>(reinterpret_cast<const uint4*>(up + size_t(row) * upStride)[column], values);
#pragma unroll
    for (int k = 0; k < kVectorValues; ++k) {
        values[k] *= rounded(activatedBy(gates[k], activation, kDtype), kDtype);
    }
    reinterpret_cast<uint4*>(y)[vector] = pack<kDtype>(values);
}
