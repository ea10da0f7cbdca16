// What a consumer warp of a fused product (gemm.cuh) reads of the weight, and the tables of levels that it makes of it.
#pragma once
#include "gemm.cuh"

// What a consumer warp reads of the weight: the k tiles of its n tile, then those of the next item's.
template <class S>
struct WeightRing {
    const GemmProblem& p;
    const BlockWork& work;
    const int phase, tile;                // tile: the warp's n tile within a range
    const uint32 groupVectors, scaleVectors, slotBytes;
    uint32 fill, start, end;              // of the slots; plus the lane's bytes in a register, as NVRTC 13.0 builds no
                                          // valid copy to an address that is partly uniform
    const uint4 *planes, *scales;         // of the next tile, plus the lane; scales of the n tile where groups differ
    int item, kTile;
    bool present;

    __device__ __forceinline__ WeightRing(const GemmProblem& p, const BlockWork& work, int phase, int tile)
        : p(p), work(work), phase(phase), tile(tile), groupVectors(p.entries * p.scaleBits / kBitsPerByte),
          scaleVectors(p.segments * groupVectors), slotBytes(S::kPlaneBytes + scaleVectors * kVectorBytes),
          item(work.firstItem) {}

    __device__ __forceinline__ uint32 bytes() const { return S::kSlots * slotBytes; }
    __device__ __forceinline__ void begin(uint32 ring, uint32 laneBytes) {
        fill = start = ring + laneBytes;
        end = start + bytes();
        if (item < work.items) enterItem();
#pragma unroll 1
        for (int i = 0; i < S::kSlots - 1; ++i) fetch();
    }
    __device__ __forceinline__ void enterItem() {
        const WorkItem next = workItem(p, item);
        const uint32 lane = threadIdx.x % kWarpSize, first = work.firstTile + phase;
        present = tile < next.nTiles && phase < work.ownTiles;
        const size_t own = size_t(next.expert(p)) * p.nTiles() + next.nTile + (present ? tile : 0);
        planes = p.tiles + (own * work.kTiles + first) * S::kPlaneVectors + lane;
        scales = p.scales + own * p.groups * groupVectors + (p.groupMagic == 0 ? first * scaleVectors + lane : 0);
        kTile = phase;
    }
    __device__ __forceinline__ void copyScales(uint32 lane) {
        const uint32 target = fill + S::kPlaneBytes;
        if (p.groupMagic == 0) {
#pragma unroll 1
            for (uint32 v = 0; lane + v < scaleVectors; v += kWarpSize) copyAsync16(target + v * kVectorBytes, scales + v);
            scales += S::kPhases * scaleVectors;
            return;
        }
#pragma unroll 1
        for (uint32 v = lane; v < scaleVectors; v += kWarpSize) {
            const uint32 segment = v / groupVectors, place = (work.firstTile + kTile) * p.segments + segment;
            const uint32 group = min(__umulhi(place, p.groupMagic), uint32(p.groups) - 1);
            copyAsync16(target + (v - lane) * kVectorBytes, scales + (group * groupVectors + v - segment * groupVectors));
        }
    }
    // Fill the next slot with the next tile, if there is one.
    __device__ __forceinline__ void fetch() {
        if (item < work.items) {
            if (present) {
#pragma unroll
                for (int i = 0; i < S::kPlaneVectors; i += kWarpSize) copyAsyncOnce16(fill + i * kVectorBytes, planes + i);
                planes += S::kPhases * S::kPlaneVectors;
                copyScales(threadIdx.x % kWarpSize);
            }
            kTile += S::kPhases;
            if (kTile >= work.ownTiles) {
                item += work.itemStep;
                if (item < work.items) enterItem();
            }
        }
        copyCommit();
        fill += slotBytes;
        if (fill == end) fill = start;
    }
};

// The tables of a tile's 16 rows, made by a warp: a lane those of one row for every second segment. Where there is one
// segment, two lanes make the same.
template <class S, int kBits>
struct TableMaker {
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
