// What is multiplied by a weight of sign planes, written in the order of arrange.cuh by the kernel that computes it: the norms
// and gated activations of decode/norm.cuh, the same bits as theirs and then bcqArrange's.
#include "arrange_rows.cuh"
#include "../decode/norm.cuh"

// Grid: one block per token. K: a multiple of 8, at most kNormThreads * kVectors * 8.
template <bool kCentered, int kDtype, int kVectors>
__global__ void __launch_bounds__(kNormThreads)
bcqArrangeNorm(const uint16* x,                    // [M, K]; written until the wait, so not __restrict__
               const uint16* __restrict__ weight,  // [K]
               const uint16* __restrict__ bias,    // [K], or null
               uint4* __restrict__ arranged,       // see arrange.cuh
               int K, float epsilon, int tileTokens, int bits) {
    __shared__ float room[kNormThreads / kWarpSize];
    __shared__ uint4 row[kVectors * kNormThreads];
    normToken<kCentered, kDtype, kVectors>(x, nullptr, weight, bias, nullptr, K, epsilon, room,
                                           [&](int vector, const uint4& value) { row[vector] = value; });
    const int panels = rowPanels(K);
    for (int vector = K / kVectorValues + threadIdx.x; vector < panels * kPanelChunks; vector += kNormThreads) {
        row[vector] = uint4{};
    }
    __syncthreads();
    for (int vector = threadIdx.x; vector < panels * kPanelChunks; vector += kNormThreads) {
        const int panel = vector / kPanelChunks, chunk = vector % kPanelChunks;
        const uint16* columns = reinterpret_cast<const uint16*>(row) + panel / 2 * kBlockK;
        arranged[arrangedPlace(blockIdx.x, panel, chunk, tileTokens, panels)] =
            arrangedChunk(columns, bits, panel % 2, chunk);
    }
}

// Grid: see ThreadVector. K: a multiple of 8.
template <int kDtype>
__global__ void __launch_bounds__(kArrangeThreads)
bcqArrangeGated(const uint16* gate,            // [M, K], rows gateStride apart
                const uint16* up,              // likewise
                uint4* __restrict__ arranged,  // see arrange.cuh
                int M, int K, int gateStride, int upStride, int activation, int tileTokens, int bits) {
    __shared__ Rows rows;
    const ThreadVector own;
    const bool present = own.m < M;
    allowNextKernel();
    waitForPriorKernels();
    uint4 value = {};
    if (present && own.k < K) {
        value = gatedVector<kDtype>(gate + size_t(own.m) * gateStride + own.k, up + size_t(own.m) * upStride + own.k,
                                    activation);
    }
    arrangeVector(rows, own, value, arranged, present, K, tileTokens, bits);
}
