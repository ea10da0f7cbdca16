// y[M, N] = the epilogue of x W^T + bias for a weight of sign planes, on the tensor cores for 16-bit floats: gemm.cuh.
#include "gemm_loop.cuh"
#include "gemm_products.cuh"

template <bool kWarpgroup,  // whether the tensor cores of four warps multiply together
          int kBits,        // planes of the weight
          int kOrder,       // of the weight in memory: kPlaneOrder, kCodeOrder or kGridOrder
          bool kAdds,       // whether offsets are added behind the tables of levels
          int kDtype,       // of x and y: fp16 or bf16
          int kTokens,      // of a tile
          int kRowGroups,   // of four consumer warps, each with rows of their own
          int kPhases,      // of such, which take k tiles in turn
          int kSlots,       // of a consumer warp's ring
          bool kFine,       // of codes and many tokens: whether levels change within half a tile
          int kPartners>    // blocks that copy x for each other: 1 or 2
__global__ void __launch_bounds__((kRowGroups * kPhases + 1) * kGroupThreads, 1)
bcqGemm(const uint4* __restrict__ tiles, const uint4* __restrict__ scales, const uint16* __restrict__ factors,
        const uint4* x, const __grid_constant__ TensorMap xMap,  // the map for codes and warpgroups, else x: gemm_tile.cuh
        const uint16* __restrict__ bias, const uint16* residual, uint16* y, float* partials, uint32* ready,
        int M, int N, int K, int groups, uint32 groupMagic, int entries, int scaleBits, int segments, int stages,
        int rangeTiles, int longRanges, int ranges, int tokenTiles, int tokenBand, int wholeItems, int splits, int activation) {
    constexpr bool kCodes = kOrder != kPlaneOrder;
    using Expansion = typename ExpansionOf<kOrder, kBits, kAdds, kDtype>::Type;
    multiplyTokens<GemmShape<Expansion, kTokens, kRowGroups, kPhases, kSlots, kFine, kPartners>,
                   typename ProductsOf<kWarpgroup, kDtype, kTokens, kPartners>::Type>(
        {tiles, scales, factors, kCodes && kWarpgroup ? reinterpret_cast<const uint4*>(&xMap) : x, bias, residual, y,
         partials, ready, M, N, K, groups, groupMagic, entries, scaleBits, segments, stages, rangeTiles, longRanges, ranges,
         tokenTiles, tokenBand, wholeItems, splits, activation});
}
