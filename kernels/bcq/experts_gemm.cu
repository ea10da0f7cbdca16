// y[p] = W_e x[p] + bias_e for all pairs p of a token and an expert e that it chose, in one launch: the fused product
// (experts_gemm.cuh) over tiles of tokens that have one expert each (route.cu), x in the order of arrange.cuh.
//
// How many tiles there are is read on the GPU; blocks without work end at once.
#include "experts_levels.cuh"
#include "experts_sums.cuh"

template <class S, class Products>
__device__ __forceinline__ void multiplyExperts(const ExpertsProblem& p) {
    extern __shared__ unsigned char dynamicShared[];
    const uint32 barriers = (sharedAddress(dynamicShared) + kBarrierBytes - 1) & ~uint32(kBarrierBytes - 1);
    const uint32 stages = barriers + kBarrierBytes, rings = stages + p.stages * S::kStageBytes;
    const int warp = __shfl_sync(kFullWarp, threadIdx.x / kWarpSize, 0), lane = threadIdx.x % kWarpSize;
    const ExpertsWork work(p);
    prepareBarriers<S, Products>(barriers, warp, p.stages, 1);
    __syncthreads();
    allowNextKernel();
    if (warp >= S::kGroups * kGroupWarps) {
        Products::template registers<S::kGroups, false>();
        if (Products::copies(warp % kGroupWarps)) copyExpertsX<S, Products>(p, work, barriers);
        __syncwarp();
        if (work.parts > 1) clusterSync(), clusterSync();  // those of finishItem
        return;
    }

    Products::template registers<S::kGroups, true>();
    const Consumer own = Consumer::of<Products::kCollective, S::kRowGroups>(warp, lane);
    ExpertsRing<S> ring(p, work, own.phase, own.tile);
    const uint32 tableBytes = p.segments * S::kSegmentTable, allTables = rings + S::kGroups * kGroupWarps * ring.bytes();
    uint32 ownRing = rings + warp * ring.bytes() + lane * kVectorBytes;
    keepInRegister(ownRing);  // NVRTC 13.0 builds no valid copy to an address that is partly uniform
    TilePlace<S> at(ownRing, ring.slotBytes, allTables + warp * 2 * tableBytes, tableBytes);
    ring.begin(ownRing);
    const uint32 sums = work.parts > 1 ? stages : allTables + S::kGroups * kGroupWarps * 2 * tableBytes;
    const TableMaker<typename S::Row> maker(lane, p.entries, p.scaleBits, p.segments);
    StagePlace first{0, 0};  // of the item
    for (int i = work.firstItem; i < work.items; i += work.itemStep) {
        float acc[S::kTokens / 2] = {};
        StagePlace place = first;
        place.advance(own.phase * S::kTileStages, p.stages);
        copyWait<S::kSlots - 2>();
        __syncwarp();
        maker.make(at.scalesOf(at.slot, lane), at.tables);
#pragma unroll 1
        for (int k = own.phase; k < work.ownTiles; k += S::kPhases) {
            multiplyTile<S, Products>(acc, p, own, at, ring, maker, barriers, stages, place);
            at.advance();
        }
        first.skip(work.ownTiles * S::kTileStages, p.stages);
        if (i == work.firstItem) waitForPriorKernels();  // which may read y
        finishItem<S>(acc, p, own, workItem(p, i), work, sums);
    }
}

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
    multiplyExperts<GemmShape<LevelExpansion<kBits, ExpertsBlock, kAdds, kDtype>, kTokens, kRowGroups, kPhases, kSlots>,
                    typename ExpertsProductsOf<kWarpgroup, kDtype, kTokens>::Type>(
        {{tiles, scales, factors, x, bias, nullptr, y, nullptr, nullptr, tokenTiles * kTokens, N, K, groups, groupMagic,
          entries, scaleBits, segments, stages, rangeTiles, longRanges, ranges, tokenTiles, tokenBand, 0, 1,
          kNoActivation},
         tileExperts, slots});
}
