// A whole fused product (gemm.cuh): the consumers' loop over k tiles, and who does what.
#pragma once
#include "gemm_sums.cuh"
#include "gemm_weights.cuh"

// One of the block's consumer warps.
struct Consumer {
    int phase, tile;  // tile: its n tile within a range
    uint32 lane;
    bool signals;             // whether this thread says that a stage of x is read

    template <bool kCollective, int kRowGroups>
    __device__ __forceinline__ static Consumer of(int warp, int lane) {
        const int group = warp / kGroupWarps;
        return {group / kRowGroups, group % kRowGroups * kGroupWarps + warp % kGroupWarps, uint32(lane),
                kCollective ? threadIdx.x % kGroupThreads == 0 : lane == 0};
    }
};

// Where a consumer warp is in shared memory: the slot of its tile, that tile's tables and those of the next one.
struct TilePlace {
    uint32 slot, firstSlot, endSlot, tables, otherTables;

    __device__ __forceinline__ uint32 nextSlot(uint32 slotBytes) const {
        return slot + slotBytes == endSlot ? firstSlot : slot + slotBytes;
    }
    __device__ __forceinline__ void advance(uint32 slotBytes) {
        slot = nextSlot(slotBytes);
        const uint32 used = tables;
        tables = otherTables, otherTables = used;
    }
};

// Add the products of a k tile to the sums, and make the tables of the one behind it, if there is one.
template <class S, class Products, int kBits, bool kAdds, int kDtype>
__device__ __forceinline__ void multiplyTile(float* acc, const GemmProblem& p, const Consumer& own, const TilePlace& at,
                                             uint32 slotBytes, const TableMaker<S, kBits>& maker, uint32 barriers,
                                             uint32 stages, StagePlace& place) {
    typename S::Row upper, lower;
    PlaneWords<kBits> upperWords, lowerWords;
    Products products;
#pragma unroll
    for (int word = 0; word < kTileWords; ++word) {
        if (word % kChunkWords == 0) {
            const int half = word / kChunkWords;
            uint32 upperPlanes[kBits], lowerPlanes[kBits];
#pragma unroll
            for (int i = 0; i < kBits; ++i) {
                const uint2 two = loadSharedWords(at.slot + (i * kWarpSize + own.lane) * kVectorBytes + half * 8);
                upperPlanes[i] = two.x, lowerPlanes[i] = two.y;
            }
            upperWords.take(upperPlanes);
            lowerWords.take(lowerPlanes);
            // Segments narrower than half a tile differ between the lanes of a row.
            const int column = half * kTileQuads + own.lane % kTileQuads;
            const uint32 tables = at.tables + column * p.segments / kTileWords * S::kSegmentTable;
            upper.load(tables, own.lane / kTileQuads);
            lower.load(tables, own.lane / kTileQuads + kTileN / 2);
        }
        uint32 a[kWordPairs], b[kWordPairs];
        upperWords.expand(upper, word % kChunkWords, a);
        lowerWords.expand(lower, word % kChunkWords, b);
        if (word % S::kStageWords == 0) {
            barrierWait(barriers + place.stage * sizeof(uint64), place.parity);
            products.take(stages + place.stage * S::kStageBytes, own.lane);
        }
        const int panel = word % S::kStageWords / kPanelWords, step = word % kPanelWords * 2;
        products.fence();
        products.add(acc, a[0], b[0], a[1], b[1], panel, step);
        products.add(acc, a[2], b[2], a[3], b[3], panel, step + 1);
        products.commit();
        if (word == kTileWords - 3) {  // while the last products run
            copyWait<S::kSlots - 2>();
            __syncwarp();
            maker.make(at.nextSlot(slotBytes) + S::kPlaneBytes, at.otherTables);
        }
        if (word % S::kStageWords == S::kStageWords - 1) {
            products.template wait<0>();
            if (!Products::kCollective) __syncwarp();
            if (own.signals) barrierArrive(barriers + (kMostStages + place.stage) * sizeof(uint64));
            place.advance(1, p.stages);
        } else {
            products.template wait<1>();
        }
    }
}

// Turn the consumers' sums of an item into y.
template <class S, int kDtype>
__device__ __forceinline__ void finishItem(const float* acc, const GemmProblem& p, const Consumer& own,
                                           const WorkItem& item, const BlockWork& work, uint32 start) {
    const bool shared = work.parts > 1;
    const SumPlace sums{start, shared ? S::kTokens : S::kSumTokens, S::kRowGroups * kGroupWarps * kTileN + kSumPadding};
    const int row = own.tile * kTileN + own.lane / kTileQuads, firstToken = item.tokenTile * S::kTokens;
    if (shared) namedSync(1, S::kConsumers);  // x and the rings are read, and the sums take their place
#pragma unroll 1
    for (int chunk = 0; chunk < S::kTokens; chunk += S::kSumTokens) {
#pragma unroll
        for (int i = 0; i < S::kTokens / 2; ++i) {  // registers have no index
            if (i / (S::kSumTokens / 2) * S::kSumTokens != chunk) continue;
            const int token = i / 4 * 8 + 2 * (own.lane % kTileQuads) + i % 2 - (shared ? 0 : chunk);
            storeShared4(sums.at(own.phase, token, row + i / 2 % 2 * (kTileN / 2)), __float_as_uint(acc[i]));
        }
        if (shared) continue;
        namedSync(1, S::kConsumers);
        writeTokens<S, kDtype>(p, item, work, sums, firstToken + chunk, S::kSumTokens);
        namedSync(1, S::kConsumers);
    }
    if (!shared) return;
    clusterSync();
    writeTokens<S, kDtype>(p, item, work, sums, firstToken, S::kTokens);
    clusterSync();  // the other block has read this one's sums
}

// Products: kCollective, whether the four warps of a group multiply together; kCopyArrivals, threads that arrive for a
// stage of x; copies(warp), whether a thread of the copying group copies; Copies, how; registers<groups, consumes>(), a
// warp's share of the registers; take() a stage; add() four registers of A times 16 columns of it, fence() before and
// commit() behind such; wait<n>() for all but the last n commits.
template <class S, class Products, int kBits, bool kAdds, int kDtype>
__device__ __forceinline__ void multiplyTokens(const GemmProblem& p) {
    extern __shared__ unsigned char dynamicShared[];
    const uint32 barriers = (sharedAddress(dynamicShared) + kBarrierBytes - 1) & ~uint32(kBarrierBytes - 1);
    const uint32 stages = barriers + kBarrierBytes, rings = stages + p.stages * S::kStageBytes;
    const int warp = __shfl_sync(kFullWarp, threadIdx.x / kWarpSize, 0), lane = threadIdx.x % kWarpSize;
    const BlockWork work(p);
    if (threadIdx.x < p.stages) {
        barrierInit(barriers + threadIdx.x * sizeof(uint64), Products::kCopyArrivals);
        barrierInit(barriers + (kMostStages + threadIdx.x) * sizeof(uint64),
                      S::kRowGroups * (Products::kCollective ? 1 : kGroupWarps));
    }
    __syncthreads();
    allowNextKernel();
    if (warp >= S::kGroups * kGroupWarps) {
        Products::template registers<S::kGroups, false>();
        if (Products::copies(warp % kGroupWarps)) copyX<S, Products>(p, work, barriers);
        __syncwarp();
        if (work.parts > 1) clusterSync(), clusterSync();  // those of finishItem
        return;
    }

    Products::template registers<S::kGroups, true>();
    const Consumer own = Consumer::of<Products::kCollective, S::kRowGroups>(warp, lane);
    WeightRing<S> ring(p, work, own.phase, own.tile);
    const uint32 tableBytes = p.segments * S::kSegmentTable, allTables = rings + S::kGroups * kGroupWarps * ring.bytes();
    TilePlace at;
    at.slot = at.firstSlot = rings + warp * ring.bytes(), at.endSlot = at.firstSlot + ring.bytes();
    at.tables = allTables + warp * 2 * tableBytes, at.otherTables = at.tables + tableBytes;
    uint32 laneBytes = lane * kVectorBytes;
    keepInRegister(laneBytes);
    ring.begin(at.firstSlot, laneBytes);
    const uint32 sums = work.parts > 1 ? stages : allTables + S::kGroups * kGroupWarps * 2 * tableBytes;
    const TableMaker<S, kBits> maker(p, lane);
    StagePlace first{0, 0};  // of the item
    for (int i = work.firstItem; i < work.items; i += work.itemStep) {
        float acc[S::kTokens / 2] = {};
        StagePlace place = first;
        place.advance(own.phase * S::kTileStages, p.stages);
        copyWait<S::kSlots - 2>();
        __syncwarp();
        maker.make(at.slot + S::kPlaneBytes, at.tables);
#pragma unroll 1
        for (int k = own.phase; k < work.ownTiles; k += S::kPhases) {
            ring.fetch();
            __syncwarp();
            multiplyTile<S, Products, kBits, kAdds, kDtype>(acc, p, own, at, ring.slotBytes, maker, barriers, stages, place);
            at.advance(ring.slotBytes);
            place.advance((S::kPhases - 1) * S::kTileStages, p.stages);
        }
        first.advance(work.ownTiles * S::kTileStages, p.stages);
        if (i == work.firstItem) waitForPriorKernels();  // which may read y or write the residual
        finishItem<S, kDtype>(acc, p, own, workItem(p, i), work, sums);
    }
}
