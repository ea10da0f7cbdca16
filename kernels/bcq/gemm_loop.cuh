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
template <class S, class Products>
__device__ __forceinline__ void multiplyTile(float* acc, const GemmProblem& p, const Consumer& own, const TilePlace& at,
                                             uint32 slotBytes, const TableMaker<S>& maker, uint32 barriers,
                                             uint32 stages, StagePlace& place) {
    constexpr int kBits = S::kBits;
    typename S::Row upper, lower;
    PlaneWords<kBits, S::kCodes> upperWords, lowerWords;
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

// Turn the consumers' sums of a segment into y, or leave them to the block that does.
template <class S>
__device__ __forceinline__ void finishSegment(float* acc, const GemmProblem& p, const Consumer& own, int itemNumber,
                                              uint32 start) {
    const BlockWork work(p);
    const SharedItem<S> shared(p, work, itemNumber);
    if (work.block > shared.first) {
        shared.leave(acc, p, work);
        return;
    }
    if (shared.last > shared.first) shared.collect(acc, p, work);
    if constexpr (S::kPhases > 1) addPhases<S>(acc, own.phase, start);
    const WorkItem item = workItem(p, itemNumber);
    if (own.phase > 0 || own.tile >= item.nTiles) return;
    writeTile<S>(acc, p, item.nTile + own.tile, item.tokenTile * S::kTokens, own.lane);
}

// Products: kCollective, whether the four warps of a group multiply together; kCopyArrivals, threads that arrive for a
// stage of x; copies(warp), whether a thread of the copying group copies; Copies, how; registers<groups, consumes>(), a
// warp's share of the registers; take() a stage; add() four registers of A times 16 columns of it, fence() before and
// commit() behind such; wait<n>() for all but the last n commits.
template <class S, class Products>
__device__ __forceinline__ void multiplyTokens(const GemmProblem& p) {
    extern __shared__ unsigned char dynamicShared[];
    const uint32 barriers = (sharedAddress(dynamicShared) + kBarrierBytes - 1) & ~uint32(kBarrierBytes - 1);
    const uint32 stages = barriers + kBarrierBytes, rings = stages + p.stages * S::kStageBytes;
    const int warp = __shfl_sync(kFullWarp, threadIdx.x / kWarpSize, 0), lane = threadIdx.x % kWarpSize;
    if (threadIdx.x < p.stages) {
        barrierInit(barriers + threadIdx.x * sizeof(uint64), Products::kCopyArrivals);
        barrierInit(barriers + (kMostStages + threadIdx.x) * sizeof(uint64),
                      S::kRowGroups * (Products::kCollective ? 1 : kGroupWarps));
    }
    __syncthreads();
    allowNextKernel();
    if (warp >= S::kGroups * kGroupWarps) {
        Products::template registers<S::kGroups, false>();
        if (Products::copies(warp % kGroupWarps)) copyX<S, Products>(p, barriers);
        __syncwarp();
        return;
    }

    Products::template registers<S::kGroups, true>();
    const Consumer own = Consumer::of<Products::kCollective, S::kRowGroups>(warp, lane);
    WeightRing<S> ring(p, own.phase, own.tile);
    const uint32 tableBytes = p.segments * S::kSegmentTable, allTables = rings + S::kGroups * kGroupWarps * ring.bytes();
    TilePlace at;
    at.slot = at.firstSlot = rings + warp * ring.bytes(), at.endSlot = at.firstSlot + ring.bytes();
    at.tables = allTables + warp * 2 * tableBytes, at.otherTables = at.tables + tableBytes;
    uint32 laneBytes = lane * kVectorBytes;
    keepInRegister(laneBytes);
    ring.begin(at.firstSlot, laneBytes);
    const uint32 sums = allTables + S::kGroups * kGroupWarps * 2 * tableBytes;
    const TableMaker<S> maker(p, lane);
    copyWait<S::kSlots - 2>();
    __syncwarp();
    maker.make(at.slot + S::kPlaneBytes, at.tables);
    StagePlace place{0, 0};
    place.advance(own.phase * S::kTileStages, p.stages);
    int k = own.phase;  // phases take the block's k tiles in turn, across its segments
#pragma unroll 1
    for (int index = 0;; ++index) {
        const BlockWork work(p);
        if (index >= work.segments) break;
        const Segment segment = work.segment(p, index);
        float acc[S::kTokens / 2] = {};
#pragma unroll 1
        for (; k < segment.tiles; k += S::kPhases) {
            ring.fetch();
            __syncwarp();
            multiplyTile<S, Products>(acc, p, own, at, ring.slotBytes, maker, barriers, stages, place);
            at.advance(ring.slotBytes);
            place.advance((S::kPhases - 1) * S::kTileStages, p.stages);
        }
        k -= segment.tiles;
        if (index == 0) waitForPriorKernels();  // which may read y, write the residual or use the partials' memory
        finishSegment<S>(acc, p, own, segment.item, sums);
    }
}
