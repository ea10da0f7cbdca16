// Norms and gated activations of one decoding step, in rows: norm.cuh.
#include "norm.cuh"

namespace {

constexpr int kGatedThreads = QK_GATED_THREADS;

}  // namespace

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
    uint4* to = reinterpret_cast<uint4*>(y + size_t(blockIdx.x) * K);
    normToken<kCentered, kDtype, kVectors>(x, addend, weight, bias, sum, K, epsilon, room,
                                           [=](int vector, const uint4& value) { to[vector] = value; });
}

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
    const int row = vector * kVectorValues / width, column = vector * kVectorValues - row * width;
    reinterpret_cast<uint4*>(y)[vector] =
        gatedVector<kDtype>(gate + size_t(row) * gateStride + column, up + size_t(row) * upStride + column, activation);
}
