// How the blocks of a persistent launch share out the items of a product, each of the same k tiles.
//
//   item         a range of the weight's rows x a tile of tokens; token tiles fastest within bands, so that blocks that run
//                together share weights and x in L2
//   work         the first wholeItems items are dealt in rounds, one a block. The k tiles of the others stand in a row, of
//                which every block takes an equal share: the end of one item and the beginning of the next, say
//   sums         of an item that several blocks share, the first block adds those of the others to its own, in order: the
//                same result bit for bit every time
//   splits       or all items are whole, and the two blocks of a cluster share the k tiles of one (splits.cuh)
//
// All blocks of the launch run at once, as they wait for each other. "Block" is a cluster of kPartners or splits blocks.
#pragma once
#include "cluster.cuh"
#include "counts.cuh"

constexpr int kSharedItems = QK_SHARED_ITEMS;  // that a block has a share of, at most

struct ItemPlan {
    int items, wholeItems, kTiles;  // wholeItems: a multiple of the blocks, or all; kTiles: of an item
    int splits = 1;                 // 2: every cluster has one item
};

// Which rows and tokens an item has: numbers of its range and of its token tile.
struct ItemPlace {
    int range, tokenTile;
};
__device__ __forceinline__ ItemPlace itemPlace(int item, int ranges, int tokenTiles, int tokenBand) {
    int range = item, tokenTile = 0;
    if (tokenTiles > 1) {
        const int bandItems = tokenBand * ranges, band = item / bandItems, within = item - band * bandItems;
        const int height = min(tokenBand, tokenTiles - band * tokenBand);
        range = within / height;
        tokenTile = band * tokenBand + within - range * height;
    }
    return {range, tokenTile};
}

template <int kPartners>
__device__ __forceinline__ int partner() { return kPartners > 1 ? clusterRank() : 0; }

// What a block does without a break: k tiles of an item.
struct Segment {
    int item, firstTile, tiles;
};

// The work of a block. Computed anew wherever a segment begins or ends, which is cheaper than registers.
template <int kPartners>
struct BlockWork {
    int kTiles, rounds, shared, segments;  // rounds: of whole items; shared: k tiles of the others, of all blocks
    int splits;
    int block, blocks, firstShared, endShared;

    // The first one of a block's share. The products stay below 2^31: there are fewer shared items than blocks.
    __device__ __forceinline__ int shareStart(int block) const { return shared * block / blocks; }
    __device__ __forceinline__ int blockOf(int tile) const { return ((tile + 1) * blocks - 1) / shared; }

    // Of a Problem with items(), an ItemPlan.
    template <class Problem>
    __device__ __forceinline__ explicit BlockWork(const Problem& p) : kTiles(p.items().kTiles) {
        const ItemPlan plan = p.items();
        asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));  // volatile: not kept
        splits = plan.splits;
        if (splits > 1) {
            const int rank = clusterRank();
            block /= 2, rounds = 0, segments = block < plan.items, shared = 0;
            firstShared = kTiles * rank / 2 * segments, endShared = kTiles * (rank + 1) / 2 * segments;
            return;
        }
        block /= kPartners;
        blocks = gridDim.x / kPartners;
        // Divisions take a while, and all warps wait for them before they ask for their first tiles.
        rounds = plan.wholeItems <= blocks ? block < plan.wholeItems : (plan.wholeItems - block + blocks - 1) / blocks;
        shared = (plan.items - plan.wholeItems) * kTiles;
        firstShared = endShared = 0, segments = rounds;
        if (shared == 0) return;
        firstShared = shareStart(block), endShared = shareStart(block + 1);
        segments += endShared > firstShared ? (endShared - 1) / kTiles - firstShared / kTiles + 1 : 0;
    }
    __device__ __forceinline__ int allTiles() const { return rounds * kTiles + endShared - firstShared; }
    template <class Problem>
    __device__ __forceinline__ Segment segment(const Problem& p, int index) const {
        if (splits > 1) return {block, firstShared, endShared - firstShared};
        if (index < rounds) return {block + index * blocks, 0, kTiles};
        const int item = firstShared / kTiles + index - rounds, start = item * kTiles;
        const int first = max(firstShared, start), end = min(endShared, start + kTiles);
        return {p.wholeItems + item, first - start, end - first};
    }
};

// Four sums at once.
template <class Sum>
struct FourOf;
template <>
struct FourOf<float> {
    using Type = float4;
};
template <>
struct FourOf<int> {
    using Type = int4;
};

// An item that several blocks share: the first of them has its first k tiles, which it multiplies last of all. The others
// multiply their parts first, and leave the sums in memory, every thread its own. S: kTokens / 2 sums of every one of the
// first kConsumers threads, kPartners, Work. A problem has partials [block][kSharedItems][4 sums][thread] in vectors, and ready:
// warps that have written or seen these, per shared item; zeros before and behind.
template <class S>
struct SharedItem {
    static constexpr int kVectors = S::kTokens / 8;
    int first, last, item;  // blocks; item: from the first shared one on

    template <class Problem>
    __device__ __forceinline__ SharedItem(const Problem& p, const typename S::Work& work, int item)
        : item(item - p.wholeItems) {
        first = last = work.block;
        if (this->item < 0) return;
        first = work.blockOf(this->item * work.kTiles), last = work.blockOf((this->item + 1) * work.kTiles - 1);
    }
    static __device__ __forceinline__ int ofPartner(int place) { return place * S::kPartners + partner<S::kPartners>(); }
    // Of a block's sums: four of this thread, S::kConsumers vectors from its next four.
    template <class Four, class Problem>
    __device__ __forceinline__ Four* of(const Problem& p, const typename S::Work& work, int block) const {
        const int place = ofPartner(block * kSharedItems + item - work.shareStart(block) / work.kTiles);
        return reinterpret_cast<Four*>(p.partials) + size_t(place) * kVectors * S::kConsumers + threadIdx.x;
    }
    // By a block that is not the first.
    template <class Problem, class Sum>
    __device__ __forceinline__ void leave(const Sum* acc, const Problem& p, const typename S::Work& work) const {
        using Four = typename FourOf<Sum>::Type;
        Four* to = of<Four>(p, work, work.block);
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            __stcg(to + i * S::kConsumers, Four{acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]});
        }
        __syncwarp();
        if (threadIdx.x % kWarpSize == 0) releaseCount(ready(p), counted());
    }
    template <class Problem>
    __device__ __forceinline__ uint32* ready(const Problem& p) const { return p.ready + ofPartner(item); }
    // Warps that leave sums, and those that have seen that they are there: behind the last of these nobody reads the count.
    __device__ __forceinline__ uint32 counted() const { return (last - first + 1) * (S::kConsumers / kWarpSize); }
    // By the first block: its sums and those of the others, in order.
    template <class Problem, class Sum>
    __device__ __forceinline__ void collect(Sum* acc, const Problem& p, const typename S::Work& work) const {
        const uint32 left = counted() - S::kConsumers / kWarpSize;
        while (acquireCount(ready(p)) < left) {
        }
        __syncwarp();
        if (threadIdx.x % kWarpSize == 0) addToCount(ready(p), counted());
#pragma unroll 1
        for (int block = first + 1; block <= last; ++block) {
            using Four = typename FourOf<Sum>::Type;
            const Four* from = of<Four>(p, work, block);
#pragma unroll
            for (int i = 0; i < kVectors; ++i) {
                const Four part = __ldcg(from + i * S::kConsumers);
                acc[4 * i] += part.x, acc[4 * i + 1] += part.y, acc[4 * i + 2] += part.z, acc[4 * i + 3] += part.w;
            }
        }
    }
};
