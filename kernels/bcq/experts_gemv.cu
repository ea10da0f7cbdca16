// y[p] = W_e x[p / choices] + bias_e for every pair p of a token and one of its `choices` experts, e = chosen[p]: one
// launch over all pairs, each a product of one token as in binary_gemv.cu.
//
// Which experts these are is known on the GPU alone, so a block reads its pair's expert before anything else. A choice of
// no expert (a number outside 0 .. experts - 1) gives zeros.
//
// Grid: x = blocks of a pair, as in ring.cuh; z = pair. Shared memory and parameters: ring.cuh.
#include "binary_step.cuh"

template <int kBits,      // planes of the weights
          int kSegment,   // columns per activation scale: 32, 64, 128 or 256, a divisor of the group size
          int kScaleBits, // of a scale and of an offset: 16, fp16, or 8
          int kWarps,     // warps per block
          int kStepTiles, // tiles per stage of a warp's ring
          int kStages>    // stages per ring
__global__ void __launch_bounds__(kWarps * kWarpSize, 1)
bcqExpertsGemv(const uint4* __restrict__ tiles,    // sign tiles of all experts
               const void* __restrict__ scales,    // scale tiles
               const uint16* __restrict__ factors, // factor tiles, or null with fp16 scales
               const uint16* __restrict__ x,       // [pairs / choices, K], fp16 or bf16
               const uint16* __restrict__ bias,    // [experts, N] in x's type, or null
               uint16* __restrict__ y,             // [pairs, N]
               const long long* __restrict__ chosen,  // [pairs]
               int experts, int choices, int N, int K, int groups, uint32 groupMagic, int entries, int passTiles,
               int rangeTiles, int longRanges, int dtype, int vectors) {
    waitForPriorKernels();  // one of them may write the choices
    const int pair = blockIdx.z;
    const long long expert = chosen[pair];
    if (expert < 0 || expert >= experts) {
        uint16* row = y + size_t(pair) * N;
        for (int n = blockIdx.x * blockDim.x + threadIdx.x; n < N; n += gridDim.x * blockDim.x) row[n] = 0;
        return;
    }
    const size_t tileRow = size_t(expert) * ((N + kTileN - 1) / kTileN);
    const size_t tileVectors = size_t((K + kTileK - 1) / kTileK) * kBits * kWarpSize;
    const size_t scaleBytes = size_t(groups) * kTileN * entries * kScaleBits / kBitsPerByte;
    multiplyWeight<BinaryProduct<kBits, kSegment, kScaleBits, 1, kStepTiles>, kWarps, kStages>(
        {tiles + tileRow * tileVectors, static_cast<const unsigned char*>(scales) + tileRow * scaleBytes,
         kScaleBits == 8 ? factors + tileRow * kTileN : nullptr, x + size_t(pair / choices) * K,
         bias, nullptr, y, 1, N, K, groups, groupMagic, entries, passTiles,
         rangeTiles, longRanges, dtype, kNoActivation, vectors, chosen});
}
