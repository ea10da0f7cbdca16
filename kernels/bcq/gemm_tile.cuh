// A k tile of a fused product (gemm.cuh): what a consumer warp needs for it, and how it adds its products.
//
// Products: kCollective, whether the four warps of a group multiply together; kCopyArrivals, threads that arrive for a
// stage of x; copies(warp), whether a thread of the copying group copies; Copies, how; registers<groups, consumes>(), a
// warp's share of the registers; take() a stage; add() four registers of A times 16 columns of it, fence() before and
// commit() behind such; wait<n>() for all but the last n commits.
#pragma once
#include "gemm.cuh"

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

    __device__ __forceinline__ TilePlace(uint32 ring, uint32 ringBytes, uint32 tables, uint32 tableBytes)
        : slot(ring), firstSlot(ring), endSlot(ring + ringBytes), tables(tables), otherTables(tables + tableBytes) {}
    __device__ __forceinline__ uint32 nextSlot(uint32 slotBytes) const {
        return slot + slotBytes == endSlot ? firstSlot : slot + slotBytes;
    }
    __device__ __forceinline__ void advance(uint32 slotBytes) {
        slot = nextSlot(slotBytes);
        const uint32 used = tables;
        tables = otherTables, otherTables = used;
    }
};

// The barriers of the stages of x: filled, read.
template <class S, class Products>
__device__ __forceinline__ void prepareBarriers(uint32 barriers, int stages) {
    if (threadIdx.x >= stages) return;
    barrierInit(barriers + threadIdx.x * sizeof(uint64), Products::kCopyArrivals);
    barrierInit(barriers + (kMostStages + threadIdx.x) * sizeof(uint64),
                S::kRowGroups * (Products::kCollective ? 1 : kGroupWarps));
}

// The tables of a tile's 16 rows, made by a warp: a lane those of one row for every second segment. Where there is one
// segment, two lanes make the same.
template <class S>
struct TableMaker {
    static constexpr int kBits = S::kBits;
    const int row, entries, scaleBits, rounds;
    uint32 entry, table, nextEntry;  // bytes: from a slot's scales and from the tables to the lane's first; to its next

    __device__ __forceinline__ TableMaker(const GemmProblem& p, int lane)
        : row(lane % kTileN), entries(p.entries), scaleBits(p.scaleBits), rounds((p.segments + 1) / 2) {
        const int segment = p.segments > 1 ? lane / kTileN : 0, pairBytes = kLaneRows * scaleBits / kBitsPerByte;
        nextEntry = 2 * (kTileN / kLaneRows) * entries * pairBytes;
        entry = (segment * (kTileN / kLaneRows) + row % 8) * entries * pairBytes + row / 8 * (pairBytes / kLaneRows);
        table = segment * S::kSegmentTable;
    }
    __device__ __forceinline__ void make(uint32 scales, uint32 tables) const {
        uint32 from = scales + entry, to = tables + table;
#pragma unroll 1
        for (int i = 0; i < rounds; ++i, from += nextEntry, to += 2 * S::kSegmentTable) {
            float scale[kBits], offset = 0.0f;
            if (scaleBits == 16) {
#pragma unroll
                for (int b = 0; b < kBits; ++b) scale[b] = halfToFloat(loadShared2(from + b * 4));
                if (entries > kBits) offset = halfToFloat(loadShared2(from + kBits * 4));
            } else {
#pragma unroll
                for (int b = 0; b < kBits; ++b) scale[b] = float(loadShared1(from + b * 2));
                if (entries > kBits) offset = float(int8(loadShared1(from + kBits * 2)));
            }
            S::Row::make(to, row, scale, offset);
        }
    }
};

// Add the products of a k tile to the sums, and make the tables of the one behind it, if there is one.
template <class S, class Products>
__device__ __forceinline__ void multiplyTile(float* acc, const GemmProblem& p, const Consumer& own, const TilePlace& at,
                                             uint32 slotBytes, const TableMaker<S>& maker, uint32 barriers,
                                             uint32 stages, StagePlace& place) {
    constexpr int kBits = S::kBits;
    typename S::Row upper, lower;
    typename S::Words upperWords, lowerWords;
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
