// y[M, N] = the epilogue of x W^T + bias for a weight of sign planes, on the tensor cores for 16-bit floats: gemm.cuh.
#include "gemm_loop.cuh"
#include "gemm_products.cuh"

template <bool kWarpgroup,  // whether the tensor cores of four warps multiply together
          int kBits,        // planes of the weight
          bool kAdds,       // whether offsets are added behind the tables of levels
          int kDtype,       // of x and y: fp16 or bf16
          int kTokens,      // of a tile
          int kRowGroups,   // of four consumer warps, each with rows of their own
          int kPhases,      // of such, which take k tiles in turn
          int kSlots>       // of a consumer warp's ring
__global__ void __launch_bounds__((kRowGroups * kPhases + 1) * kGroupThreads, 1)
bcqGemm(const uint4* __restrict__ tiles, const uint4* __restrict__ scales, const uint16* __restrict__ factors,
        const uint4* x, const uint16* __restrict__ bias, const uint16* residual, uint16* y, int M, int N, int K,
        int groups, uint32 groupMagic, int entries, int scaleBits, int segments, int stages,
        int rangeTiles, int longRanges, int ranges, int tokenTiles, int tokenBand, int activation) {
    multiplyTokens<GemmShape<kBits, kAdds, kDtype, kTokens, kRowGroups, kPhases, kSlots>,
                   typename ProductsOf<kWarpgroup, kDtype, kTokens>::Type, kBits, kAdds, kDtype>(
        {tiles, scales, factors, x, bias, residual, y, M, N, K, groups, groupMagic, entries, scaleBits, segments,
         stages, rangeTiles, longRanges, ranges, tokenTiles, tokenBand, activation, nullptr, nullptr});
}
