// The loop of level_gemv.cu: which tiles of a block's n tiles a warp takes, and how they get to it.
//
// Grid and passes: as for ring.cuh. The k tiles of the block's n tiles stand in a row, n tile after n tile, and every warp
// takes an equal share of neighbours. So it reads one run of memory, has the sums of few n tiles to leave in shared memory,
// and leaves them where its n tile changes. Sums of an n tile are added in the order of warps: repeatable bit for bit. A
// warp takes the codes of a stage into registers, and fills the stage again while they are multiplied.
//
//   shared memory: mailbox of a cluster's block
//                  stage [warp][stages] {codes [plane][lane] uint4, scales [segment][g][entry][2]}
//                  levels [warp], of a Product that makes tables
//                  records of x [set of eight tokens][k tile] (level_x.cuh)
//                  sums of x [k tile][segment][token] fp32, of a Product that needs them
//                  sums [warp][slot][row][token] fp32; slot: of the warp's n tiles, at most n tiles over warps, plus one
//                  received from the other block of a cluster: half of [n tile][row][token] fp32
#pragma once
#include "grid_step.cuh"

// The tiles of a warp in one pass over a block's k tiles.
template <int kWarps>
struct Share {
    int width, nTile, k, left;  // width: k tiles of the pass; of the next tile: its n tile, its place in the pass

    __device__ __forceinline__ Share(int pass, int passTiles, int kTiles, int nTiles) {
        width = min(passTiles, kTiles - pass * passTiles);
        const int warp = threadIdx.x / kWarpSize, all = nTiles * width, first = warp * all / kWarps;
        left = (warp + 1) * all / kWarps - first;
        nTile = first / width, k = first - nTile * width;
    }
};

// The tiles that a warp asks for, those of a pass in turn.
template <class S, int kWarps>
struct TilesAhead {
    static constexpr bool kFewScales = Weights<S>::kMostScaleVectors <= kWarpSize;  // of a tile: a vector for each lane
    const Weights<S>& weights;
    const uint4* codes;  // of the next tile, plus the lane
    int nTile, k, width, end, left;  // end: of the pass, from the start of the row
    const uint32 segment, vector;    // of the lane's scales: of a tile, of a group
    const bool scales;               // whether it has some

    __device__ __forceinline__ explicit TilesAhead(const Weights<S>& weights)
        : weights(weights), segment(weights.lane * weights.vectorMagic >> 16), vector(weights.lane - segment * weights.groupVectors),
          scales(segment < S::kTileSegments) {}

    __device__ __forceinline__ void begin(const Share<kWarps>& share, int firstTile) {
        nTile = share.nTile, k = firstTile + share.k, width = share.width, end = firstTile + width, left = share.left;
        codes = weights.signs + size_t(nTile * weights.kTiles + k) * S::kSignVectors;
    }
    // Ask for the next tile, if there is one. Without a branch where scales are few, as a warp waits for each.
    __device__ __forceinline__ void fetch(uint32 stage) {
        const uint32 target = stage + weights.lane * kVectorBytes;
        const bool present = left > 0;
#pragma unroll
        for (int i = 0; i < S::kBits; ++i) copyAsyncOnce16If(target + i * kWarpSize * kVectorBytes, codes + i * kWarpSize, present);
        if constexpr (kFewScales) {
            const uint32 group = nTile * weights.groups + weights.groupOf(k * S::kTileSegments + segment);
            copyAsync16If(target + S::kSignBytes, weights.scales + (group * weights.groupVectors + vector), present && scales);
        } else if (present) {
            const uint32 tile = nTile * weights.kTiles + k;
            if (weights.linear) weights.fetchScales(target + S::kSignBytes, tile);
            else weights.fetchScales(target + S::kSignBytes, tile, nTile, 1);
        }
        copyCommit();
        const bool last = k + 1 == end;
        codes += (last ? weights.kTiles - width + 1 : 1) * S::kSignVectors;
        k += last ? 1 - width : 1, nTile += last, --left;
    }
};

// The first n tile of a warp, in every pass, as shares are the same part of n tiles whatever their width.
template <int kWarps>
__device__ __forceinline__ int firstNTileOf(int warp, int nTiles) { return warp * nTiles / kWarps; }

template <class Product, int kWarps>
__device__ __forceinline__ void multiplyLevels(const Problem& p) {
    using S = typename Product::Shape;
    using Record = typename Product::Record;
    constexpr int kAhead = kWarps > 12 ? 3 : 4;  // words of x; more registers than the loop has would slow it down
    constexpr int kThreads = kWarps * kWarpSize, kTokens = Product::kTokens, kTileSums = kTileN * kTokens;
    extern __shared__ __align__(16) unsigned char shared[];
    Mailbox& mailbox = *reinterpret_cast<Mailbox*>(shared);
    unsigned char* stages = shared + kMailboxBytes;

    const int lane = pinned(threadIdx.x % kWarpSize), warp = pinned(threadIdx.x / kWarpSize);
    const uint32 parts = clusterBlocks(), part = clusterRank(), partShift = parts - 1;  // clusters of one block or two
    const int range = blockIdx.x >> partShift;
    const int firstNTile = range * p.rangeTiles + min(range, p.longRanges);
    const int nTiles = p.rangeTiles + (range < p.longRanges), slots = (nTiles + kWarps - 1) / kWarps + 1;
    const int kTiles = (p.K + kTileK - 1) / kTileK;
    const int firstTile = uint32(kTiles) * part >> partShift;
    const int ownTiles = (uint32(kTiles) * (part + 1) >> partShift) - firstTile;
    const int passes = (ownTiles + p.passTiles - 1) / p.passTiles;
    const int firstToken = blockIdx.y * kTokens;
    const bool offset = p.entries > S::kScales;
    const int scaleBits = S::kAnyScales && p.factors ? 8 : 16;
    const uint32 groupVectors = p.entries * scaleBits / kBitsPerByte, groupBytes = groupVectors * kVectorBytes;
    auto magic = [&](int bytes) {  // 2^16 over the vectors of a group, without a division
        return offset ? (1u << 16) / S::groupVectors(1, bytes) + 1 : (1u << 16) / S::groupVectors(0, bytes) + 1;
    };
    const Weights<S> weights{
        pinned(p.tiles + size_t(firstNTile) * kTiles * S::kSignVectors + lane),
        pinned(static_cast<const uint4*>(p.scales) + size_t(firstNTile) * p.groups * groupVectors),
        uint32(kTiles), uint32(p.groups), groupVectors, uint32(lane), p.groupMagic,
        scaleBits == 16 ? magic(2) : magic(1),
        p.groupMagic == 0 && p.groups == kTiles * S::kTileSegments};
    const uint32 stageBytes = pinned(S::kSignBytes + S::kStepSegments * groupBytes);
    const uint32 stageCount = Product::kRing ? p.stages : 1;
    const uint32 ringBytes = stageCount * stageBytes, firstStage = pinned(sharedAddress(stages) + warp * ringBytes);
    const uint32 setBytes = pinned(p.passTiles * Record::kBytes);
    unsigned char* records = stages + kWarps * (ringBytes + Product::kTableBytes);
    unsigned char* xSums = records + Product::kSets * setBytes;
    float* sums = reinterpret_cast<float*>(xSums + p.passTiles * Product::kSumBytes);

    TilesAhead<S, kWarps> ahead(weights);
    auto beginPass = [&](int pass, uint32 stage) {
        const Share<kWarps> own(pass, p.passTiles, ownTiles, nTiles);
        ahead.begin(own, firstTile + pass * p.passTiles);
        ahead.fetch(stage);
        if (stageCount > 1) ahead.fetch(stage == firstStage ? pinned(firstStage + stageBytes) : firstStage);
        return own;
    };
    Share<kWarps> own = beginPass(0, firstStage);
    for (int i = threadIdx.x; i < slots * kWarps * kTileSums; i += kThreads) sums[i] = 0.0f;
    if (clusterBlocks() > 1) {
        if (threadIdx.x == 0) mailbox.prepare();
        mailbox.arrive();
    }
    allowNextKernel();
    Product product(lane, p.entries, scaleBits, pinned(sharedAddress(stages) + kWarps * ringBytes + warp * Product::kTableBytes));
    waitForPriorKernels();  // from here on x may be read and y written

    const uint16* x = p.x + size_t(firstToken) * p.K;
    Columns piece{min(kTokens, p.M - firstToken), firstTile * kTileK, p.K, p.vectors != 0};
    float* ownSums = sums + warp * slots * kTileSums;
    uint32 stage = firstStage;
    for (int pass = 0; pass < passes; ++pass) {
        if (pass > 0) own = beginPass(pass, stage);
        const uint32 firstRecord = sharedAddress(records), firstSum = sharedAddress(xSums);
        makePairRecords<Record, kAhead>(x, piece, own.width * kWordsPerTileRow, records, setBytes);
        piece.first += p.passTiles * kTileK;
        __syncthreads();
        Product::template prepare<kWarps>(firstRecord, setBytes, own.width, firstSum);
        float* target = ownSums + (own.nTile - firstNTileOf<kWarps>(warp, nTiles)) * kTileSums;
        uint32 k = own.k, left = own.left;
#pragma unroll 1
        while (left > 0) {
            uint32 count = min(own.width - k, left), place = firstRecord + lane * kVectorBytes + k * Record::kBytes;
            uint32 xSum = firstSum + k * Product::kSumBytes;
            left -= count, k = 0;
#pragma unroll 1
            do {
                if (stageCount == 1) copyWait<0>();
                else copyWait<1>();
                __syncwarp();  // every lane's copies are there, and the levels of the tile before were read
                product.take(stage);
                __syncwarp();
                product.begin();
                ahead.fetch(stage);
                if (stageCount > 1) stage = stage == firstStage ? firstStage + stageBytes : firstStage;
                product.multiplyTile(place, setBytes, xSum);
                place += Record::kBytes, xSum += Product::kSumBytes;
            } while (--count > 0);
            product.flush(target, lane);
            target += kTileSums;
        }
        __syncthreads();
    }

    // What an element of the n tiles adds up to in this block: of the warps that have a share of the n tile, in order.
    const uint32 nTilesMagic = 0xffffffffu / uint32(nTiles) + 1;  // 2^32 over them, rounded up; 0 for one
    auto warpAt = [&](int share) { return nTiles == 1 ? share : int(__umulhi(share, nTilesMagic)); };
    auto blockSum = [&](int i) {
        const int nTile = i / kTileSums, last = warpAt((nTile + 1) * kWarps - 1);
        float sum = 0.0f;
#pragma unroll 1
        for (int w = warpAt(nTile * kWarps); w <= last; ++w) {
            sum += sums[(w * slots + nTile - firstNTileOf<kWarps>(w, nTiles)) * kTileSums + i % kTileSums];
        }
        return sum;
    };
    finishTiles<Product, kThreads, true>(p, firstNTile, nTiles, firstToken, mailbox, sums + slots * kWarps * kTileSums, blockSum);
}
