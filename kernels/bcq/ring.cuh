// The part of the bcq GEMVs that does not depend on how signs are multiplied: the pipeline that streams the weights, the
// share of each warp, and the final sums. A Product (binary_step.cuh, int8_step.cuh) makes records of x, multiplies the
// weights of a step and keeps sums.
//
// Grid: x = blocks, about one per multiprocessor, each a contiguous range of n tiles; y = groups of kTokens tokens.
// A step is up to kStepTiles neighbouring k tiles of one n tile. The warps of a block take the steps in order, so that
// together they read straight on. Each warp streams its steps through a ring of kStages stages of its own (cp.async); the
// first stages are in flight while the records are made. Two resident blocks of successive launches per multiprocessor
// (kResident = 2) let the next kernel's stages fill while this one ends. K too long for shared memory is taken in passes
// of `passTiles` k tiles. Every warp has its own sum of every row; they are added in warp order at the end: fp32, no
// atomics, repeatable bit for bit. Where records are much work, the two blocks of a cluster share a range of n tiles:
// each makes the records of half of x, and each adds up half of the sums, of which the other sends it its part.
//
//   shared memory: mailbox of a cluster's block
//                  ring [warp][kStages] {signs [tile][plane][lane] uint4, scales [tile][segment][g][entry][2]}
//                  records [set of tokens][k tile]
//                  sums [n tile][warp][row][token] fp32
//                  received from the other block of a cluster: half of [n tile][row][token] fp32
#pragma once
#include "codes.cuh"
#include "outputs.cuh"
#include "stages.cuh"
#include "../shared/mma.cuh"

constexpr int kLongStep = 4;  // tiles
constexpr int kMailboxBytes = kClusters ? QK_MAILBOX_BYTES : 0;  // stages off whole lines take 15 % longer to fill
constexpr int kLineBytes = 128, kLineElements = kLineBytes / sizeof(uint16);

// The entries of rows g and g + 8, the first in the low bits.
template <int kScaleBits>
__device__ __forceinline__ uint32 loadPair(uint32 shared) {
    if constexpr (kScaleBits == 16) return loadShared4(shared);
    else return loadShared2(shared);
}

// Add up what the lanes of a quad have of two rows, add to `target` [row][token], start again at zero.
template <int kTokens>
__device__ __forceinline__ void flushQuads(float (&sums)[kTokens][kLaneRows], float* target, int lane) {
    const int quad = lane % kTileQuads, g = lane / kTileQuads, row = quad % kLaneRows;
#pragma unroll
    for (int m = 0; m < kTokens; ++m) {
        const float other = __shfl_xor_sync(kFullWarp, row ? sums[m][0] : sums[m][1], 1);
        const float total = laneSum<kLaneRows, kTileQuads>((row ? sums[m][1] : sums[m][0]) + other);
        if (quad < kLaneRows) target[(g + row * (kTileN / kLaneRows)) * kTokens + m] += total;
        sums[m][0] = sums[m][1] = 0.0f;
    }
}

// The steps of one pass: how many an n tile has, the first of this warp, and the distance to its next.
struct Pass {
    int width, steps, firstNTile, firstStep, nStride, stepStride;
};

// Without divisions: every warp runs this before its first fetch, and most n tiles have more steps than a block warps.
template <int kWarps, int kStepTiles>
__device__ __noinline__ Pass passOf(int pass, int passTiles, int kTiles) {
    const int width = min(passTiles, kTiles - pass * passTiles);
    const int steps = (width + kStepTiles - 1) / kStepTiles;
    Pass found{width, steps, 0, int(threadIdx.x / kWarpSize), 0, kWarps};
    for (; found.firstStep >= steps; found.firstStep -= steps) ++found.firstNTile;
    for (; found.stepStride >= steps; found.stepStride -= steps) ++found.nStride;
    return found;
}

// A whole kernel. Product: kTokens tokens at once, in sets of kSetTokens whose tiles share a record of kRecord bytes;
// kHoldsWord: one row, and registers for a word of it per thread while stages are filled.
template <class Product, int kWarps, int kStages>
__device__ __forceinline__ void multiplyWeight(const Problem& p) {
    static_assert(kStages >= 2, "one stage is read while another is filled");
    using S = typename Product::Shape;
    constexpr int kThreads = kWarps * kWarpSize, kStepTiles = S::kStepTiles, kTokens = Product::kTokens;
    constexpr int kRecord = Product::Record::kBytes, kTileSums = kTileN * kTokens;
    // A long step is mostly all that a warp has of an n tile: its sums leave while the next step is worked on, so that
    // nothing waits for their shuffles. Sums of short steps leave where the n tile changes.
    constexpr bool kEveryStep = kTokens == 1 && kStepTiles >= kLongStep;
    // One row of x is asked for behind half of the first stages: what is on its way before it keeps it waiting.
    constexpr int kFirstStages = Product::kHoldsWord && kStages > 2 ? (kStages - 1) / 2 : kStages - 1;
    extern __shared__ __align__(16) unsigned char shared[];
    Mailbox& mailbox = *reinterpret_cast<Mailbox*>(shared);
    unsigned char* rings = shared + kMailboxBytes;

    const int lane = pinned(threadIdx.x % kWarpSize), warp = pinned(threadIdx.x / kWarpSize);
    // A division is some 25 instructions, which every warp would run before its first fetch: none here but where x comes
    // in passes. Clusters are of one block or two.
    const uint32 parts = clusterBlocks(), part = clusterRank(), partShift = parts - 1;
    const int range = blockIdx.x >> partShift;
    const int firstNTile = range * p.rangeTiles + min(range, p.longRanges);
    const int nTiles = p.rangeTiles + (range < p.longRanges);
    const int kTiles = (p.K + kTileK - 1) / kTileK;
    const int firstTile = uint32(kTiles) * part >> partShift;
    const int ownTiles = (uint32(kTiles) * (part + 1) >> partShift) - firstTile;
    const int passes = ownTiles <= p.passTiles ? 1 : (ownTiles + p.passTiles - 1) / p.passTiles;
    const int firstToken = blockIdx.y * kTokens;
    const bool offset = p.entries > S::kScales;
    const uint32 groupVectors = offset ? S::groupVectors(1) : S::groupVectors(0), groupBytes = groupVectors * kVectorBytes;

    const Weights<S> weights{
        pinned(p.tiles + size_t(firstNTile) * kTiles * S::kSignVectors + lane),
        pinned(static_cast<const uint4*>(p.scales) + size_t(firstNTile) * p.groups * groupVectors),
        uint32(kTiles), uint32(p.groups), groupVectors, uint32(lane), p.groupMagic,
        offset ? (1u << 16) / S::groupVectors(1) + 1 : (1u << 16) / S::groupVectors(0) + 1,
        p.groupMagic == 0 && p.groups == kTiles * S::kTileSegments};
    const uint32 stageBytes = pinned(S::kSignBytes + S::kStepSegments * groupBytes), ringBytes = kStages * stageBytes;
    const uint32 firstStage = pinned(sharedAddress(rings) + warp * ringBytes), endStage = pinned(firstStage + ringBytes);
    unsigned char* records = rings + kWarps * ringBytes;
    const uint32 setBytes = pinned(p.passTiles * kRecord);
    float* sums = reinterpret_cast<float*>(records + kTokens / Product::kSetTokens * setBytes);

    // The step fetched next: its pass, n tile, place in the row, first tile counted through the block.
    Pass own = passOf<kWarps, kStepTiles>(0, p.passTiles, ownTiles), ahead = own;
    int aheadPass = 0, aheadNTile = ahead.firstNTile, aheadStep = ahead.firstStep;
    uint32 aheadTile = aheadNTile * kTiles + firstTile + aheadStep * kStepTiles;
    auto skipToWork = [&] {  // past the passes that have no step for this warp
        while (aheadNTile >= nTiles && aheadPass + 1 < passes) {
            ahead = passOf<kWarps, kStepTiles>(++aheadPass, p.passTiles, ownTiles);
            aheadNTile = ahead.firstNTile, aheadStep = ahead.firstStep;
            aheadTile = aheadNTile * kTiles + firstTile + aheadPass * p.passTiles + aheadStep * kStepTiles;
        }
    };
    auto fetchStage = [&](uint32 stage) {
        if (aheadNTile < nTiles) {
            weights.fetch(stage, aheadTile, aheadNTile, min(kStepTiles, ahead.width - aheadStep * kStepTiles));
            aheadNTile += ahead.nStride, aheadStep += ahead.stepStride;
            aheadTile += ahead.nStride * kTiles + ahead.stepStride * kStepTiles;
            if (aheadStep >= ahead.steps) {
                aheadStep -= ahead.steps, ++aheadNTile;
                aheadTile += kTiles - ahead.steps * kStepTiles;
            }
        }
        copyCommit();
    };
    uint32 filled = firstStage;  // pinned below: NVRTC 13.0 builds no valid copy to an address that is partly uniform
    auto fetchStages = [&](int count, bool skip) {
#pragma unroll 1
        for (int i = 0; i < count; ++i, filled = pinned(filled + stageBytes)) {
            if (skip) skipToWork();
            fetchStage(filled);
        }
    };
    const int firstStages = passes == 1 ? kFirstStages : kStages - 1;  // no calls while x is in registers
    fetchStages(firstStages, passes > 1);
    for (int i = threadIdx.x; i < nTiles * kWarps * kTileSums; i += kThreads) sums[i] = 0.0f;
    // What is read behind the wait and at the end would come from memory. Before the wait, since writes meet in L2.
    const int prefetched = firstNTile * kTileN + threadIdx.x * kLineElements;
    if (prefetched < min(p.N, (firstNTile + nTiles) * kTileN)) {
        if (p.bias) prefetchL2(p.bias + prefetched);
        if (p.residual) prefetchL2(p.residual + prefetched);
    }
    if constexpr (kTokens == 1) {  // more tokens would wait for each other's lines longer than this gains
        for (int i = threadIdx.x * kLineElements; i < p.K; i += kThreads * kLineElements) {
            prefetchL2(p.x + size_t(firstToken) * p.K + i);
        }
    }
    if (clusterBlocks() > 1) {
        if (threadIdx.x == 0) mailbox.prepare();
        mailbox.arrive();
    }
    allowNextKernel();
    Product product(lane, p.entries, groupBytes);
    waitForPriorKernels();  // from here on x may be read and y written

    const uint16* x = p.x + size_t(firstToken) * p.K;
    Activations piece{min(kTokens, p.M - firstToken), firstTile * kTileK, p.K, p.dtype, p.vectors,
                      Product::kHoldsWord};
    RawWord raw;
    if constexpr (Product::kHoldsWord) {
        const bool present = threadIdx.x < own.steps * kStepTiles * kWordsPerTileRow;
        const int k = piece.k + threadIdx.x * kBitsPerWord;
        loadPairs(x + k, present ? p.K - k : 0, p.vectors, raw.pairs);
        fetchStages(kStages - 1 - firstStages, false);
    }

    uint32 stage = firstStage, emptyStage = endStage - stageBytes;
    for (int pass = 0; pass < passes; ++pass) {
        if (pass > 0) own = passOf<kWarps, kStepTiles>(pass, p.passTiles, ownTiles);
        makeRecords<typename Product::Record, kTokens, Product::kSetTokens>(
            x, piece, own.steps * kStepTiles * kWordsPerTileRow, records, setBytes, raw);
        piece.k += p.passTiles * kTileK, piece.loaded = false;
        __syncthreads();

        constexpr uint32 kStepBytes = kStepTiles * kRecord;
        const uint32 rowBytes = pinned(own.steps * kStepBytes), strideBytes = pinned(own.stepStride * kStepBytes);
        const uint32 endRecord = pinned(sharedAddress(records) + rowBytes);
        uint32 record = endRecord - rowBytes + own.firstStep * kStepBytes;
        int nTile = own.firstNTile, present = nTile;  // present: the n tile that the sums belong to
        auto target = [&] { return sums + (present * kWarps + warp) * kTileSums; };
        float last[1][kLaneRows] = {};  // of the step before
        while (nTile < nTiles) {
            copyWait<kStages - 2>();
            __syncwarp();  // the stage filled next was read by every lane
            if (passes > 1) skipToWork();
            fetchStage(emptyStage);
            if (!kEveryStep && nTile != present) {
                product.flush(target(), lane);
                present = nTile;
            }
            product.multiplyStep(stage, p.entries, record, setBytes);
            if constexpr (kEveryStep) {
                flushQuads<1>(last, target(), lane);
                present = nTile;
#pragma unroll
                for (int row = 0; row < kLaneRows; ++row) {
                    last[0][row] = product.sums[0][row];
                    product.sums[0][row] = 0.0f;
                }
            }
            emptyStage = stage;
            stage = stage + stageBytes == endStage ? firstStage : stage + stageBytes;
            nTile += own.nStride, record += strideBytes;
            if (record >= endRecord) record -= rowBytes, ++nTile;
        }
        if (present < nTiles) {
            if constexpr (kEveryStep) flushQuads<1>(last, target(), lane);
            else product.flush(target(), lane);
        }
        __syncthreads();
    }

    // What an element of the n tiles adds up to in this block, in warp order.
    auto blockSum = [&](int i) {
        const float* first = sums + i / kTileSums * kWarps * kTileSums + i % kTileSums;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += first[w * kTileSums];
        return sum;
    };
    finishTiles<Product, kThreads>(p, firstNTile, nTiles, firstToken, mailbox, sums + nTiles * kWarps * kTileSums, blockSum);
}
