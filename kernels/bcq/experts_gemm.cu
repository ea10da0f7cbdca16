// y[p] = W_e x[p] + bias_e for all pairs p of a token and an expert e that it chose, in one launch: the fused product
// (gemm.cuh) over tiles of tokens that have one expert each (route.cu), x in the order of arrange.cuh.
//
// How many tiles there are is read on the GPU; blocks without work end at once.
#include "gemm_loop.cuh"
#include "gemm_products.cuh"

template <bool kWarpgroup,  // template parameters: gemm.cu
          int kBits, bool kAdds, int kDtype, int kTokens, int kRowGroups, int kPhases, int kSlots>
__global__ void __launch_bounds__((kRowGroups * kPhases + 1) * kGroupThreads, 1)
bcqExpertsGemm(const uint4* __restrict__ tiles,     // sign tiles of all experts
               const uint4* __restrict__ scales,    // scale tiles
               const uint16* __restrict__ factors,  // factor tiles, or null with fp16 scales
               const uint4* x,                      // arranged
               const uint16* __restrict__ bias,     // [experts, N] in x's type, or null
               uint16* y,                           // [pairs, N]
               const int* tileExperts, const int* slots, const int* tileCount,
               int N, int K, int groups, uint32 groupMagic, int entries, int scaleBits, int segments, int stages,
               int rangeTiles, int longRanges, int ranges, int tokenBand) {
    waitForPriorKernels();  // the first of which found the tiles
    const int tokenTiles = *tileCount;
    multiplyTokens<GemmShape<kBits, kAdds, kDtype, kTokens, kRowGroups, kPhases, kSlots>,
                   typename ProductsOf<kWarpgroup, kDtype, kTokens>::Type, kBits, kAdds, kDtype>(
        {tiles, scales, factors, x, bias, nullptr, y, tokenTiles * kTokens, N, K, groups, groupMagic, entries, scaleBits,
         segments, stages, rangeTiles, longRanges, ranges, tokenTiles, tokenBand, kNoActivation, tileExperts, slots});
}
