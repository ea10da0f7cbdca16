// x [M, K], fp16 or bf16, in the order of arrange.cuh for weights of `bits` planes, zeros behind column K.
//
// Tokens behind M are not written: a product mixes no tokens, and what comes of theirs is not written either.
#include "arrange_rows.cuh"

namespace {

// Eight columns of a row of x, zeros behind column K.
__device__ __forceinline__ uint4 loadVector(const uint16* x, int source, int k, int K, int vectors) {
    const uint16* from = x + size_t(source) * K + k;
    if (vectors) return k < K ? *reinterpret_cast<const uint4*>(from) : uint4{};
    uint32 pairs[kChunkValues / 2] = {};
#pragma unroll
    for (int i = 0; i < kChunkValues; ++i) {
        if (k + i < K) pairs[i / 2] |= uint32(from[i]) << i % 2 * 16;
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

}  // namespace

__global__ void __launch_bounds__(kArrangeThreads)
bcqArrange(const uint16* x,                // [M, K]; written until the wait, so not __restrict__
           uint4* __restrict__ arranged,  // see arrange.cuh
           int M, int K,
           int tileTokens,  // of a token tile
           int bits, int vectors) {  // vectors: rows of x are 16-byte aligned and K % 8 == 0
    __shared__ Rows rows;
    const ThreadVector own;
    const bool present = own.m < M;
    allowNextKernel();
    waitForPriorKernels();
    const uint4 value = present ? loadVector(x, own.m, own.k, K, vectors) : uint4{};
    arrangeVector(rows, own, value, arranged, present, K, tileTokens, bits);
}

// For experts: place m of their tiles takes row slots[m] / choices of x; places of no pair, -1, stay as they are.
__global__ void __launch_bounds__(kArrangeThreads)
bcqExpertsArrange(const uint16* x,                // [pairs / choices, K]; written until the wait, as slots are
                  uint4* __restrict__ arranged,  // see arrange.cuh
                  const int* slots,              // [M], route.cu
                  int choices,                   // pairs that share a row of x
                  int M, int K, int tileTokens, int bits, int vectors) {
    __shared__ Rows rows;
    const ThreadVector own;
    allowNextKernel();
    waitForPriorKernels();
    const int slot = own.m < M ? slots[own.m] : -1;
    const uint4 value = slot >= 0 ? loadVector(x, slot / choices, own.k, K, vectors) : uint4{};
    arrangeVector(rows, own, value, arranged, slot >= 0, K, tileTokens, bits);
}
