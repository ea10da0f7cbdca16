// The fused product (gemm.cuh) of experts: tiles of tokens that have one expert each (route.cu), x in their order. What
// differs from that of one weight: how many tiles there are is known on the GPU alone, so whole items are dealt in rounds,
// and sums leave for the rows of y that a tile's tokens have.
//
//   cluster      of 1 or 2 blocks, each with a part of K
//   sums         of phases and parts, added in order: the same result bit for bit every time
//
//   shared memory: as in gemm.cuh, but for the sums: [phase][token][row] fp32; of two parts in the place of x and what
//                  follows
#pragma once
#include "gemm.cuh"
#include "../shared/cluster.cuh"

struct ExpertsProblem : GemmProblem {
    // Whose tokens a tile holds, and which row of y belongs to a place in it, -1 for none. Null for one weight. What is of
    // an expert follows what is of the one before it.
    const int *tileExperts, *slots;

    __device__ __forceinline__ int nTiles() const { return (N + kTileN - 1) / kTileN; }
    __device__ __forceinline__ int expert(const WorkItem& item) const {
        return tileExperts ? tileExperts[item.tokenTile] : 0;
    }
};

// The work of a block: its part of K in k tiles, its items.
struct ExpertsWork {
    int kTiles, firstTile, ownTiles, firstItem, items, itemStep;
    uint32 part, parts;

    __device__ __forceinline__ explicit ExpertsWork(const ExpertsProblem& p)
        : kTiles((p.K + kTileK - 1) / kTileK), part(clusterRank()), parts(clusterBlocks()) {
        const uint32 shift = parts - 1;  // a cluster has one block or two
        firstTile = kTiles * part >> shift;
        ownTiles = int(kTiles * (part + 1) >> shift) - firstTile;
        firstItem = blockIdx.x >> shift, itemStep = gridDim.x >> shift;
        items = p.ranges * p.tokenTiles;
    }
};

// The group of warps that copies x.
template <class S, class Products>
__device__ __forceinline__ void copyExpertsX(const ExpertsProblem& p, const ExpertsWork& work, uint32 barriers) {
    constexpr int kStageVectors = S::kStageBytes / kVectorBytes;
    typename Products::Copies copies(barriers + kBarrierBytes);
    StagePlace place{0, 1};
    waitForPriorKernels();
    for (int item = work.firstItem; item < work.items; item += work.itemStep) {
        const size_t tile = size_t(workItem(p, item).tokenTile) * work.kTiles + work.firstTile;
        const uint4* from = p.x + tile * S::kTileStages * kStageVectors;
        for (int i = 0; i < work.ownTiles * S::kTileStages; ++i, from += kStageVectors) {
            barrierWait(barriers + (kMostStages + place.stage) * sizeof(uint64), place.parity);
            copies.template stage<S::kStageBytes>(from, barriers + place.stage * sizeof(uint64), place.stage, p.stages);
            place.advance(1, p.stages);
        }
    }
}

// What a consumer warp reads of the weight: the k tiles of its n tile, then those of the next item's.
template <class S>
struct ExpertsRing {
    const ExpertsProblem& p;
    const ExpertsWork& work;
    const int phase, tile;                // tile: the warp's n tile within a range
    const uint32 groupVectors, scaleVectors, slotBytes;
    const uint4 *planes, *scales;         // of the next tile, plus the lane; scales of the n tile where groups differ
    int item, kTile;
    bool present;

    __device__ __forceinline__ ExpertsRing(const ExpertsProblem& p, const ExpertsWork& work, int phase, int tile)
        : p(p), work(work), phase(phase), tile(tile), groupVectors(p.entries * p.scaleBits / kBitsPerByte),
          scaleVectors(p.segments * groupVectors), slotBytes(S::kPlaneBytes + scaleVectors * kVectorBytes),
          item(work.firstItem) {}

    __device__ __forceinline__ uint32 bytes() const { return S::kSlots * slotBytes; }
    // ring: of the first slot, plus the lane's bytes.
    __device__ __forceinline__ void begin(uint32 ring) {
        if (item < work.items) enterItem();
#pragma unroll 1
        for (int i = 0; i < S::kSlots - 1; ++i) fetch(ring + i * slotBytes);
    }
    __device__ __forceinline__ void enterItem() {
        const WorkItem next = workItem(p, item);
        const uint32 lane = threadIdx.x % kWarpSize, first = work.firstTile + phase;
        present = tile < next.nTiles && phase < work.ownTiles;
        const size_t own = size_t(p.expert(next)) * p.nTiles() + next.nTile + (present ? tile : 0);
        planes = p.tiles + (own * work.kTiles + first) * S::kPlaneVectors + lane;
        scales = p.scales + own * p.groups * groupVectors + (p.groupMagic == 0 ? first * scaleVectors + lane : 0);
        kTile = phase;
    }
    __device__ __forceinline__ void copyScales(uint32 lane, uint32 target) {
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
    // Fill a slot with the next tile, if there is one.
    __device__ __forceinline__ void fetch(uint32 slot) {
        if (item < work.items) {
            if (present) {
#pragma unroll
                for (int i = 0; i < S::kPlaneVectors; i += kWarpSize) copyAsyncOnce16(slot + i * kVectorBytes, planes + i);
                planes += S::kPhases * S::kPlaneVectors;
                copyScales(threadIdx.x % kWarpSize, slot + S::kPlaneBytes);
            }
            kTile += S::kPhases;
            if (kTile >= work.ownTiles) {
                item += work.itemStep;
                if (item < work.items) enterItem();
            }
        }
        copyCommit();
    }
};
