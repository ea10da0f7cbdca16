// y[m][n] = bias[n] + sum_g sum_k x[m][k] * level_g(code[n][k]),  m < 16 tokens, for a weight in the order for batches: what
// the other GEMVs are for that of planes. Codes become 16-bit floats in registers, with the instructions of the fused
// product (levels.cuh), and meet x on tensor cores as it is. One row costs as much as eight.
//
// Grid and parameters: ring.cuh; shared memory and the share of a warp: level_loop.cuh.
#include "level_loop.cuh"

template <int kOrder,      // of the weight in memory: kCodeOrder or kGridOrder
          int kBits,       // planes of the weight
          int kSegment,    // columns that share levels: 32, 64 or 128, a divisor of the group size
          int kTokens,     // tokens at once: 8 or 16
          int kWarps,      // warps per block
          bool kAdds,      // whether offsets are added behind the tables of levels
          int kDtype>      // of x and y: fp16 or bf16
__global__ void __launch_bounds__(kWarps * kWarpSize, 1)
bcqLevelGemv(const uint4* __restrict__ tiles, const void* __restrict__ scales, const uint16* __restrict__ factors,
             const uint16* __restrict__ x, const uint16* __restrict__ bias, const uint16* residual, uint16* __restrict__ y,
             int M, int N, int K, int groups, uint32 groupMagic, int entries, int passTiles, int rangeTiles,
             int longRanges, int dtype, int activation, int vectors, int stages) {
    multiplyLevels<typename ProductFor<kOrder, kBits, kSegment, kTokens, kAdds, kDtype>::Type, kWarps>(
        {tiles, scales, factors, x, bias, residual, y, M, N, K, groups, groupMagic, entries, passTiles,
         rangeTiles, longRanges, dtype, activation, vectors, nullptr, stages});
}
