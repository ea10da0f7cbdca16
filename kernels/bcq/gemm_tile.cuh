// A k tile of a fused product (gemm.cuh): what a consumer warp needs for it, and how it adds its products.
//
// Products: kCollective, whether the four warps of a group multiply together; kCopyArrivals, threads that arrive for a
// stage of x; oneLane(), true in one lane of a warp; copies(warp), whether a thread of the copying group copies; Copies, how: x
// in order, or rows of x as it is, given as [M, K] or, to WarpgroupProducts, as the address of its tensor map;
// registers<groups, consumes, sums>(), a warp's share of the registers; take() a stage; add() four registers of A times 16
// columns of it, fence() before and commit() behind such; wait<n>() for all but the last n commits.
#pragma once
#include "gemm.cuh"

// One of the block's consumer warps.
struct Consumer {
    int phase, tile;  // tile: its n tile within a range
    uint32 lane;
    bool signals;             // whether this thread says that a stage of x is read

    // kCollective: whether one thread says so for four warps.
    template <bool kCollective, int kRowGroups>
    __device__ __forceinline__ static Consumer of(int warp, int lane) {
        const int group = warp / kGroupWarps;
        return {group / kRowGroups, group % kRowGroups * kGroupWarps + warp % kGroupWarps, uint32(lane),
                kCollective ? threadIdx.x % kGroupThreads == 0 : lane == 0};
    }
};

// Where a consumer warp is in shared memory: the slot of its tile and the one that is filled meanwhile, where the tile before was, both
// plus the lane's vector; its tile's tables and those of the next one.
template <class S>
struct TilePlace {
    const uint32 slotBytes, firstSlot;
    uint32 slot, free, tables, otherTables;

    __device__ __forceinline__ TilePlace(uint32 ring, uint32 slotBytes, uint32 tables, uint32 tableBytes)
        : slotBytes(slotBytes), firstSlot(ring), slot(ring), free(ring + (S::kSlots - 1) * slotBytes), tables(tables),
          otherTables(tables + tableBytes) {}
    // The scales of a slot, the same for all lanes.
    static __device__ __forceinline__ uint32 scalesOf(uint32 slot, uint32 lane) { return slot + S::kPlaneBytes - lane * kVectorBytes; }
    __device__ __forceinline__ uint32 nextSlot() const {
        if constexpr (S::kSlots == 2) return free;
        return slot == firstSlot + (S::kSlots - 1) * slotBytes ? firstSlot : slot + slotBytes;
    }
    __device__ __forceinline__ void advance() {
        const uint32 read = slot, used = tables;
        slot = nextSlot(), free = read;
        tables = otherTables, otherTables = used;
    }
};

// The barriers of the stages of x: filled, read, summed. kByWarp: whether every consumer warp says that a stage is read. One lane
// of a warp makes those of a stage, as lanes of one warp would make theirs one after the other, 60 cycles each.
template <class S, class Products, bool kByWarp = !Products::kCollective>
__device__ __forceinline__ void prepareBarriers(uint32 barriers, int warp, int stages, int partners, bool summed = false) {
    if (!Products::oneLane()) return;
    constexpr int kWarps = (S::kGroups + 1) * kGroupWarps;
#pragma unroll 1
    for (int stage = warp; stage < stages; stage += kWarps) {
        const uint32 filled = barriers + stage * sizeof(uint64);
        barrierInit(filled, Products::kCopyArrivals);
        barrierInit(filled + kMostStages * sizeof(uint64), S::kRowGroups * (kByWarp ? kGroupWarps : 1) * partners);
        if (summed) barrierInit(filled + 2 * kMostStages * sizeof(uint64), 1);
    }
}

// Say that products have read a stage of x. read: the barrier for that.
template <class S>
__device__ __forceinline__ void giveBack(uint32 read, const Consumer& own) {
    if (!own.signals) return;
    barrierArrive(read);
    if constexpr (S::kPartners > 1) remoteArrive(read, clusterRank() ^ 1);
}

// Words that are expanded between two products, which all warps of a group begin together: of codes as many as registers carry.
template <class S>
constexpr int kTurnWords = !S::kCodes || S::kBits > kBlockPlanes || S::kGroups > 4 || S::kTokens > 128 ? 1
                           : S::kTokens <= 32                                                         ? (S::kGroups > 3 ? 2 : 4)
                                                                                                      : (S::kGroups > 3 ? 1 : 2);

// What the two rows of a lane have in a k tile, read from its slot: the planes of half a tile, or where words need no others
// those of a turn ahead.
template <class S>
struct TileWords {
    static constexpr int kAhead = kTurnWords<S>;
    static constexpr int kBits = S::kBits;
    static constexpr bool kApart = S::Words::kApart;
    const uint32 slot;
    typename S::Words upper, lower;
    uint2 next[kAhead];

    __device__ __forceinline__ explicit TileWords(uint32 slot) : slot(slot) { readAhead(0); }
    // Plane i of half a tile, or its word i; of the half that a word is in.
    __device__ __forceinline__ uint2 load(int i, int word) const {
        return loadSharedWords(slot + i * kWarpSize * kVectorBytes + word / kChunkWords * 8);
    }
    __device__ __forceinline__ void take(int word) {
        if constexpr (kApart) {
            upper.takeWord(word % kChunkWords, next[word % kAhead].x);
            lower.takeWord(word % kChunkWords, next[word % kAhead].y);
        } else if (word % kChunkWords == 0) {
            uint32 upperPlanes[kBits], lowerPlanes[kBits];
#pragma unroll
            for (int i = 0; i < kBits; ++i) {
                const uint2 two = load(i, word);
                upperPlanes[i] = two.x, lowerPlanes[i] = two.y;
            }
            upper.take(upperPlanes);
            lower.take(lowerPlanes);
        }
    }
    // Ask for the words of a turn.
    __device__ __forceinline__ void readAhead(int first) {
        if (!kApart || first >= kTileWords) return;
#pragma unroll
        for (int i = 0; i < kAhead; ++i) next[i] = load((first + i) % kChunkWords, first + i);
    }
};

// Add the products of a k tile to the sums. While they run, ask for a later tile of the weight, and make the tables of the
// next one, if there is one. Products of one stage of x run on while words of the next are expanded, but end with the tile:
// where a loop ends the compiler moves sums, and does not wait for them. kFine: whether levels may change within half a tile
// of codes, of which a word is 32 columns.
template <class S, class Products, bool kFine = false, class Ring>
__device__ __forceinline__ void multiplyTile(float* acc, const GemmProblem& p, const Consumer& own, const TilePlace<S>& at,
                                             Ring& ring, const TableMaker<typename S::Row>& maker, uint32 barriers,
                                             uint32 stages, StagePlace& place) {
    constexpr int kTurn = kTurnWords<S>;
    typename S::Row upper, lower;
    Products products;
    uint32 read = 0;  // of the stage that products have been asked to read
    __syncwarp();     // the tables of this tile are there for all lanes
    TileWords<S> words(at.slot);
#pragma unroll
    for (int first = 0; first < kTileWords; first += kTurn) {
        uint32 a[kTurn][kWordPairs], b[kTurn][kWordPairs];
#pragma unroll
        for (int i = 0; i < kTurn; ++i) {
            const int word = first + i;
            words.take(word);
            if (word % kChunkWords == 0 || (kFine && (word & -word) * p.segments >= kTileWords)) {
                // Of planes, segments narrower than half a tile differ between the lanes of a row.
                const int column = S::kCodes ? word : word + own.lane % kTileQuads;
                const uint32 tables = at.tables + column * p.segments / kTileWords * S::kSegmentTable;
                upper.load(tables, own.lane / kTileQuads);
                lower.load(tables, own.lane / kTileQuads + kTileN / 2);
            }
            words.upper.expand(upper, word % kChunkWords, a[i]);
            words.lower.expand(lower, word % kChunkWords, b[i]);
        }
        if (first % S::kStageWords == 0) {
            barrierWait(barriers + place.stage * sizeof(uint64), place.parity);
            products.take(stages + place.stage * S::kStageBytes, own.lane);
        }
        products.fence();
#pragma unroll
        for (int i = 0; i < kTurn; ++i) {
            const int word = first + i, panel = word % S::kStageWords / kPanelWords, step = word % kPanelWords * 2;
            products.add(acc, a[i][0], b[i][0], a[i][1], b[i][1], panel, step);
            products.add(acc, a[i][2], b[i][2], a[i][3], b[i][3], panel, step + 1);
        }
        products.commit();
        words.readAhead(first + kTurn);
        if (first == 0) ring.fetch(at.free);
        if (first == kTileWords - (kTurn == 1 ? 3 : 4)) {
            copyWait<S::kSlots - 2>();
            __syncwarp();
            maker.make(at.scalesOf(at.nextSlot(), own.lane), at.otherTables);
        }
        if (first + kTurn < kTileWords) products.template wait<1>();
        else products.template wait<0>();
        if (Products::kCollective && first > 0 && first % S::kStageWords == 0) giveBack<S>(read, own);
        if ((first + kTurn) % S::kStageWords > 0) continue;
        read = barriers + (kMostStages + place.stage) * sizeof(uint64);
        if (!Products::kCollective) __syncwarp();
        if (!Products::kCollective || first + kTurn == kTileWords) giveBack<S>(read, own);
        // Behind a tile, those of the other phases.
        place.advance(first + kTurn == kTileWords ? 1 + (S::kPhases - 1) * S::kTileStages : 1, p.stages);
    }
}
