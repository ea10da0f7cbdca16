// y[M, N] = x W^T + bias for a weight of sign planes that tensor cores get as 16-bit floats, expanded in registers: what
// does not depend on which products they are. A Products (gemm_products.cuh) multiplies.
//
// The problem is transposed: weights are the operand A, 16 rows a warp, tokens are the columns of B. A warp streams its
// own n tiles through a ring of its own (cp.async) and makes the tables of levels of its next tile while its products
// run. Another group of four warps copies x: of a weight of sign planes in the order of arrange.cuh, of one in the order for
// batches as it is (level_codes.cuh).
//
//   block        groups of four consumer warps, kRowGroups of them with 64 rows each, times kPhases that take k tiles of
//                the same rows in turn; and one group that copies x
//   item         a range of n tiles x a tile of kTokens tokens
//   splits       two blocks of a cluster that share the k tiles of an item, and each finish half of its sums (splits.cuh)
//   partners     two blocks of a cluster that take the same k tiles of the same tokens at a time, each with rows of its own:
//                each copies half of x, to both. "Block" below is such a pair then, and a range that of one of them
//   work         of blocks, and sums of items that several of them share: items.cuh
//   sums         of phases are added in order
//
//   shared memory: barriers, mailbox | x [stage] | rings [warp][slot] {planes, scales} | tables [warp][2] | sums |
//                  sums of the other split | sums of x
//                  sums [phase but the first][4 sums][thread of the phase] float4, or where two phases finish tokens (kFinishers)
//                  [phase][4 sums][thread of the phase] of half as many
//                  numbers (gemm_numbers.cuh) have sums of x and no tables
#pragma once
#include "arrange.cuh"
#include "grid.cuh"
#include "../shared/cluster.cuh"
#include "../shared/epilogue.cuh"
#include "../shared/splits.cuh"

constexpr int kGroupWarps = 4, kGroupThreads = kGroupWarps * kWarpSize;
constexpr int kTileWords = 2 * kChunkWords;  // of each lane, of a k tile
constexpr int kPanelWords = kTileWords / kTilePanels;
constexpr int kMostStages = QK_GEMM_MOST_STAGES, kBarrierBytes = QK_GEMM_BARRIER_BYTES;
constexpr int kMailboxPlace = kBarrierBytes - sizeof(Mailbox);
static_assert(3 * kMostStages * sizeof(uint64) <= kMailboxPlace, "three barriers a stage");

// The parameters of a kernel.
struct GemmProblem {
    const uint4* tiles;      // sign tiles
    const uint4* scales;     // scale tiles
    const uint16* factors;   // factor tiles, or null with fp16 scales
    const uint4* x;          // in the order of arrange.cuh, token tiles of kTokens; of codes see Products
    const uint16* bias;      // [N] in x's type, or null
    const uint16* residual;  // [M, N], added to the result, or null
    uint16* y;               // [M, N], or [M, N / 2] of a gated product
    float* partials;         // sums of shared items [block][kSharedItems][4 sums][thread] float4
    uint32* ready;           // warps that have written or seen these, per shared item; zeros before and behind
    int M, N, K;             // of codes K may be that of an x with zeros behind its columns, of as many k tiles
    int groups;              // scale groups per row
    uint32 groupMagic;       // 2^32 over the segments of a group, rounded up; 0 for one, all of them stored
    int entries;             // scales, and one more with an offset
    int scaleBits;           // 16, or 8
    int segments;            // of a k tile: 1, 2, 4 or 8
    int stages;              // of x
    int rangeTiles, longRanges, ranges;  // n tiles of a range, one more in the first longRanges; ranges of each partner
    int tokenTiles, tokenBand;
    int wholeItems;          // a multiple of the blocks, or all
    int splits;              // 1, or 2 blocks of a cluster; partners are not split
    int activation;          // of activation.cuh, or kNoActivation; before the residual is added; or kGated + kSilu

    __device__ __forceinline__ ItemPlan items() const {
        return {ranges * tokenTiles, wholeItems, (K + kTileK - 1) / kTileK, splits};
    }
};

// What of y an item is.
struct WorkItem {
    int nTile, nTiles, tokenTile;
};
template <int kPartners = 1>
__device__ __forceinline__ WorkItem workItem(const GemmProblem& p, int item) {
    const ItemPlace place = itemPlace(item, p.ranges, p.tokenTiles, p.tokenBand);
    const int range = place.range * kPartners + partner<kPartners>();
    return {range * p.rangeTiles + min(range, p.longRanges), p.rangeTiles + (range < p.longRanges), place.tokenTile};
}

// Where a stage of x is, and which phase of its barriers comes next.
struct StagePlace {
    int stage;
    uint32 parity;
    // advance takes by <= stages, so it needs no loop; skip takes any number.
    __device__ __forceinline__ void advance(int by, int stages) {
        stage += by;
        if (stage >= stages) stage -= stages, parity ^= 1;
    }
    __device__ __forceinline__ void skip(int by, int stages) {
        for (stage += by; stage >= stages; stage -= stages) parity ^= 1;
    }
};

// Sizes of an instance.
template <class Expansion_, int kTokens_, int kRowGroups_, int kPhases_, int kSlots_, bool kFine_ = false,
          int kPartners_ = 1>
struct GemmShape {
    using Expansion = Expansion_;
    static constexpr int kBits = Expansion::kBits, kDtype = Expansion::kDtype;
    static constexpr bool kCodes = Expansion::kCodes;
    using Words = typename Expansion::Words;
    using Row = typename Expansion::Row;
    static constexpr int kTokens = kTokens_, kRowGroups = kRowGroups_, kPhases = kPhases_, kSlots = kSlots_;
    static constexpr int kPartners = kPartners_;
    using Work = BlockWork<kPartners>;
    // Of many tokens two phases each finish half of the tokens; else the first phase finishes all.
    static constexpr int kFinishers = kPhases_ == 2 && kTokens_ >= 64 ? 2 : 1, kOwnTokens = kTokens_ / kFinishers;
    using Splits = SplitSums<kOwnTokens / 2, kFinishers * kRowGroups_ * kGroupThreads>;
    // Registers of many tokens leave no room for two forms of a tile's products: an instance has one of them.
    static constexpr bool kFine = kFine_, kBothForms = kCodes && kTokens <= QK_GEMM_FEW_TOKENS;
    // Whether warpgroups multiply numbers, of few tokens, in the place of levels.
    static constexpr bool kNumbers = Expansion::kGrid && kTokens <= QK_GEMM_NUMBER_TOKENS && !kFine;
    static constexpr int kGroups = kRowGroups * kPhases, kConsumers = kGroups * kGroupThreads;
    static constexpr int kPanels = kTokens <= 32 ? 4 : kTokens <= 64 ? 2 : 1;  // of a stage of x
    static constexpr int kStageBytes = kPanels * kTokens * kPanelRowBytes, kTileStages = kTilePanels / kPanels;
    static constexpr int kStageWords = kPanels * kPanelWords;
    static constexpr int kPlaneVectors = kBits * kWarpSize, kPlaneBytes = kPlaneVectors * kVectorBytes;
    static constexpr int kSegmentTable = kTileN * Row::kRowBytes;
};

// The group of warps that copies x.
template <class S, class Products>
__device__ __forceinline__ void copyX(const GemmProblem& p, uint32 barriers) {
    constexpr int kStageVectors = S::kStageBytes / kVectorBytes;
    typename Products::Copies copies(barriers + kBarrierBytes);
    StagePlace place{0, 1};
    const typename S::Work work(p);
    if constexpr (S::kCodes) copies.prepare(p.x);
    waitForPriorKernels();
    for (int index = 0; index < work.segments; ++index) {
        const Segment segment = work.segment(p, index);
        const int tokenTile = workItem<S::kPartners>(p, segment.item).tokenTile;
        const size_t tile = size_t(tokenTile) * work.kTiles + segment.firstTile;
        const uint4* from = p.x + tile * S::kTileStages * kStageVectors;
        int column = segment.firstTile * kTileK;
        for (int i = 0; i < segment.tiles * S::kTileStages; ++i) {
            const uint32 filled = barriers + place.stage * sizeof(uint64);
            barrierWait(filled + kMostStages * sizeof(uint64), place.parity);
            if constexpr (S::kCodes) {
                copies.template rows<S::kPanels>(p, tokenTile * S::kTokens, column, filled, place.stage, p.stages);
                column += S::kPanels * kPanelK;
            } else {
                copies.template stage<S::kStageBytes>(from, filled, place.stage, p.stages);
                from += kStageVectors;
            }
            place.advance(1, p.stages);
        }
    }
}
