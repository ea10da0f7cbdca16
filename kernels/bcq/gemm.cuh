// y[M, N] = x W^T + bias for a weight of sign planes that tensor cores get as 16-bit floats, expanded in registers: what
// does not depend on which products they are. A Products (gemm_wgmma.cu, gemm_mma.cu) multiplies.
//
// The problem is transposed: weights are the operand A, 16 rows a warp, tokens are the columns of B. A warp streams its
// own n tile through a ring of its own (cp.async) and makes the tables of levels of its next tile while its products
// run. Another group of four warps copies x, which bcqArrange has put in order (arrange.cuh).
//
//   block        groups of four consumer warps, kRowGroups of them with 64 rows each, times kPhases that take k tiles of
//                the same rows in turn; and one group that copies x
//   cluster      of 1 or 2 blocks, each with a part of K
//   work         ranges of n tiles x tiles of kTokens tokens, dealt to as many blocks (clusters) as there are; token
//                tiles fastest within bands of tokenBand, so that blocks that run together share weights and x in L2
//   sums         of phases and parts, added in order: the same result bit for bit every time
//
//   shared memory: barriers | x [stage] | rings [warp][slot] {planes, scales} | tables [warp][2] | sums
//                  sums [phase][token][row] fp32; of two parts in the place of x and what follows
#pragma once
#include "arrange.cuh"
#include "levels.cuh"
#include "../shared/cluster.cuh"
#include "../shared/epilogue.cuh"

constexpr int kGroupWarps = 4, kGroupThreads = kGroupWarps * kWarpSize;
constexpr int kTileWords = 2 * kChunkWords;  // of each lane, of a k tile
constexpr int kPanelWords = kTileWords / kTilePanels;
constexpr int kMostStages = QK_GEMM_MOST_STAGES, kBarrierBytes = QK_GEMM_BARRIER_BYTES;
constexpr int kChunkTokens = QK_GEMM_CHUNK_TOKENS, kSumPadding = QK_GEMM_SUM_PADDING;  // see sums; floats behind a token's
constexpr int kSumBatch = 4;  // pairs of sums that a thread reads at once
constexpr int kFewParts = 2;  // of a cluster, at most
static_assert(2 * kMostStages * sizeof(uint64) <= kBarrierBytes, "two barriers a stage");

// The parameters of a kernel.
struct GemmProblem {
    const uint4* tiles;      // sign tiles
    const uint4* scales;     // scale tiles
    const uint16* factors;   // factor tiles, or null with fp16 scales
    const uint4* x;          // in the order of arrange.cuh, token tiles of kTokens
    const uint16* bias;      // [N] in x's type, or null
    const uint16* residual;  // [M, N], added to the result, or null
    uint16* y;               // [M, N]
    int M, N, K;
    int groups;              // scale groups per row
    uint32 groupMagic;       // 2^32 over the segments of a group, rounded up; 0 for one, all of them stored
    int entries;             // kBits, or kBits + 1 with an offset
    int scaleBits;           // 16, or 8
    int segments;            // of a k tile: 1, 2, 4 or 8
    int stages;              // of x
    int rangeTiles, longRanges, ranges;  // n tiles of a range, one more in the first longRanges; ranges
    int tokenTiles, tokenBand;
    int activation;          // of activation.cuh, or kNoActivation; before the residual is added
    // Of experts: whose tokens a tile holds, and which row of y belongs to a place in it, -1 for none (route.cu). Null
    // for one weight. What is of an expert follows what is of the one before it.
    const int *tileExperts, *slots;

    __device__ __forceinline__ int nTiles() const { return (N + kTileN - 1) / kTileN; }
};

// What a block (cluster) works on next.
struct WorkItem {
    int nTile, nTiles, tokenTile;

    __device__ __forceinline__ int expert(const GemmProblem& p) const {
        return p.tileExperts ? p.tileExperts[tokenTile] : 0;
    }
};
__device__ __forceinline__ WorkItem workItem(const GemmProblem& p, int item) {
    int range = item, tokenTile = 0;
    if (p.tokenTiles > 1) {
        const int bandItems = p.tokenBand * p.ranges, band = item / bandItems, within = item - band * bandItems;
        const int height = min(p.tokenBand, p.tokenTiles - band * p.tokenBand);
        range = within / height;
        tokenTile = band * p.tokenBand + within - range * height;
    }
    return {range * p.rangeTiles + min(range, p.longRanges), p.rangeTiles + (range < p.longRanges), tokenTile};
}

// The work of a block: its part of K in k tiles, its items.
struct BlockWork {
    int kTiles, firstTile, ownTiles, firstItem, items, itemStep;
    uint32 part, parts;

    __device__ __forceinline__ explicit BlockWork(const GemmProblem& p)
        : kTiles((p.K + kTileK - 1) / kTileK), part(clusterRank()), parts(clusterBlocks()) {
        const uint32 shift = parts - 1;  // a cluster has one block or two
        firstTile = kTiles * part >> shift;
        ownTiles = int(kTiles * (part + 1) >> shift) - firstTile;
        firstItem = blockIdx.x >> shift, itemStep = gridDim.x >> shift;
        items = p.ranges * p.tokenTiles;
    }
};

// Where a stage of x is, and which phase of its barriers comes next.
struct StagePlace {
    int stage;
    uint32 parity;
    __device__ __forceinline__ void advance(int by, int stages) {
        for (stage += by; stage >= stages; stage -= stages) parity ^= 1;
    }
};

// Sizes of an instance.
template <int kBits, bool kAdds, int kDtype, int kTokens_, int kRowGroups_, int kPhases_, int kSlots_>
struct GemmShape {
    using Row = Levels<kBits, kAdds, kDtype>;
    static constexpr int kTokens = kTokens_, kRowGroups = kRowGroups_, kPhases = kPhases_, kSlots = kSlots_;
    static constexpr int kGroups = kRowGroups * kPhases, kConsumers = kGroups * kGroupThreads;
    static constexpr int kPanels = kTokens <= 32 ? 4 : kTokens <= 64 ? 2 : 1;  // of a stage of x
    static constexpr int kStageBytes = kPanels * kTokens * kPanelRowBytes, kTileStages = kTilePanels / kPanels;
    static constexpr int kStageWords = kPanels * kPanelWords;
    static constexpr int kPlaneVectors = kBits * kWarpSize, kPlaneBytes = kPlaneVectors * kVectorBytes;
    static constexpr int kSegmentTable = kTileN * Row::kRowBytes;
    static constexpr int kSumTokens = kTokens < kChunkTokens ? kTokens : kChunkTokens;  // whose sums leave together
};

// The group of warps that copies x.
template <class S, class Products>
__device__ __forceinline__ void copyX(const GemmProblem& p, const BlockWork& work, uint32 barriers) {
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
