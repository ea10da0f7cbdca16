// The part of the bcq GEMVs that does not depend on how signs are multiplied: how weights come, who takes what, and how
// sums leave. A Product (bcq_binary_turn.cuh, bcq_int8_turn.cuh) makes records of x, multiplies turns and keeps sums.
//
// Grid: x = blocks, about one per multiprocessor, each a contiguous range of row tiles; y = groups of kTokens tokens.
// Inside a block the warps take turns, up to kSteps neighbouring k tiles of one row tile each, so that together they
// read straight on: each streams its turns through its own ring of kDepth slots (cp.async), running ahead of everything
// else; the first slots are in flight while the records are made. Two resident blocks of successive launches per
// multiprocessor (kResident = 2) let the next kernel's slots fill while this one ends. K too long for shared memory is
// taken in passes of `passTiles` k tiles. Every warp has its own sum of every row; they are added in warp order at the
// end: fp32, no atomics, repeatable bit for bit. Where records are much work, a cluster of two blocks shares a range of
// row tiles, so that each makes those of half of x only; each finishes half of the sums, which the other one sends it.
//
//   shared memory: mailbox of a cluster's block
//                  ring [warp][kDepth] {signs [step][plane][lane] uint4, scales [step][segment][g][entry][2]}
//                  records [set of tokens][k tile]
//                  sums [row tile][warp][row][token] fp32
//                  received from the other block of a cluster: half of [row tile][row][token] fp32
#pragma once
#include "codes.cuh"
#include "slots.cuh"
#include "../shared/cluster.cuh"
#include "../shared/epilogue.cuh"
#include "../shared/mma.cuh"

constexpr int kLongTurn = 4;  // tiles
constexpr int kMailboxBytes = kClusters ? 128 : 0;  // slots that are off whole lines take 15 % longer to fill
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
        if (quad < kLaneRows) target[(g + row * (kTileRows / kLaneRows)) * kTokens + m] += total;
        sums[m][0] = sums[m][1] = 0.0f;
    }
}

// How the warps of a block take turns in one pass: turns per row tile, and from a warp's turn to its next.
struct Pass {
    int width, turns, firstRow, firstTurn, rowStep, turnStep;
};

// No divisions: every warp runs this before its first fetch, and most rows have more turns than a block has warps.
template <int kWarps, int kSteps>
__device__ __noinline__ Pass passOf(int pass, int passTiles, int kTiles) {
    const int width = min(passTiles, kTiles - pass * passTiles);
    const int turns = (width + kSteps - 1) / kSteps;
    Pass found{width, turns, 0, int(threadIdx.x / kWarpSize), 0, kWarps};
    for (; found.firstTurn >= turns; found.firstTurn -= turns) ++found.firstRow;
    for (; found.turnStep >= turns; found.turnStep -= turns) ++found.rowStep;
    return found;
}

// The parameters of a kernel.
struct Problem {
    const uint4* tiles;     // sign tiles
    const void* scales;     // scale tiles
    const uint16* factors;  // factor tiles, or null with fp16 scales
    const uint16* x;        // [tokens, columns], fp16 or bf16
    const uint16* bias;     // [rows] in x's type, or null
    const uint16* residual; // [tokens, rows], added to the result, or null
    uint16* y;              // [tokens, rows]
    int tokens, rows, columns;
    int groups;             // scale groups per row
    uint32 groupMagic;      // 2^32 over the segments of a group, rounded up; 0 for one
    int entries;            // kBits, or kBits + 1 with an offset
    int passTiles;          // k tiles whose records fit into shared memory at once; whole turns
    int rangeTiles;         // row tiles of a range (a block, or a cluster), one more in the first `longRanges`
    int longRanges;
    int dtype;
    int activation;         // of activation.cuh, or kNoActivation; before the residual is added
    int vectors;            // x rows are 16-byte aligned and columns % 8 == 0
};

// A whole kernel. Product: kTokens rows of x at once, in sets of kSetRows whose tiles share a record of kRecord bytes;
// kHoldsWord: one row, and registers for a word of it per thread while slots are filled.
template <class Product, int kWarps, int kDepth>
__device__ __forceinline__ void multiplyWeight(const Problem& p) {
    static_assert(kDepth >= 2, "one slot is read while another is filled");
    using S = typename Product::Shape;
    constexpr int kThreads = kWarps * kWarpSize, kSteps = S::kSteps, kTokens = Product::kTokens;
    constexpr int kRecord = Product::Record::kBytes, kTileSums = kTileRows * kTokens;
    // A long turn is mostly all that a warp has of a row tile: its sums leave while the next turn is worked on, so that
    // nothing waits for their shuffles. Sums of short turns leave where the row tile changes.
    constexpr bool kEveryTurn = kTokens == 1 && kSteps >= kLongTurn;
    // One row of x is asked for behind half of the first slots: what is on its way before it keeps it waiting.
    constexpr int kFirstSlots = Product::kHoldsWord && kDepth > 2 ? (kDepth - 1) / 2 : kDepth - 1;
    extern __shared__ __align__(16) unsigned char shared[];
    Mailbox& mailbox = *reinterpret_cast<Mailbox*>(shared);
    unsigned char* rings = shared + kMailboxBytes;

    const int lane = pinned(threadIdx.x % kWarpSize), warp = pinned(threadIdx.x / kWarpSize);
    // A division is some 25 instructions, which every warp would run before its first fetch: none here but where x comes
    // in passes. Clusters are of one block or two.
    const uint32 parts = clusterBlocks(), part = clusterRank(), partShift = parts - 1;
    const int range = blockIdx.x >> partShift;
    const int firstRowTile = range * p.rangeTiles + min(range, p.longRanges);
    const int rowTiles = p.rangeTiles + (range < p.longRanges);
    const int kTiles = (p.columns + kTileColumns - 1) / kTileColumns;
    const int firstTile = uint32(kTiles) * part >> partShift;
    const int ownTiles = (uint32(kTiles) * (part + 1) >> partShift) - firstTile;
    const int passes = ownTiles <= p.passTiles ? 1 : (ownTiles + p.passTiles - 1) / p.passTiles;
    const int firstToken = blockIdx.y * kTokens;
    const bool offset = p.entries > S::kBits;
    const uint32 groupVectors = offset ? S::groupVectors(1) : S::groupVectors(0), groupBytes = groupVectors * kVectorBytes;

    const Weights<S> weights{
        pinned(p.tiles + size_t(firstRowTile) * kTiles * S::kSignVectors + lane),
        pinned(static_cast<const uint4*>(p.scales) + size_t(firstRowTile) * p.groups * groupVectors),
        uint32(kTiles), uint32(p.groups), groupVectors, uint32(lane), p.groupMagic,
        offset ? (1u << 16) / S::groupVectors(1) + 1 : (1u << 16) / S::groupVectors(0) + 1,
        p.groupMagic == 0 && p.groups == kTiles * S::kTileSegments};
    const uint32 slotBytes = pinned(S::kSignBytes + S::kTurnSegments * groupBytes), ringBytes = kDepth * slotBytes;
    const uint32 firstSlot = pinned(sharedAddress(rings) + warp * ringBytes), endSlot = pinned(firstSlot + ringBytes);
    unsigned char* records = rings + kWarps * ringBytes;
    const uint32 setBytes = pinned(p.passTiles * kRecord);
    float* sums = reinterpret_cast<float*>(records + kTokens / Product::kSetRows * setBytes);

    // The turn fetched next: its pass, row tile, place in the row, first tile counted through the block.
    Pass turns = passOf<kWarps, kSteps>(0, p.passTiles, ownTiles), ahead = turns;
    int aheadPass = 0, aheadRow = ahead.firstRow, aheadTurn = ahead.firstTurn;
    uint32 aheadTile = aheadRow * kTiles + firstTile + aheadTurn * kSteps;
    auto skipToWork = [&] {  // past the passes that have no turn for this warp
        while (aheadRow >= rowTiles && aheadPass + 1 < passes) {
            ahead = passOf<kWarps, kSteps>(++aheadPass, p.passTiles, ownTiles);
            aheadRow = ahead.firstRow, aheadTurn = ahead.firstTurn;
            aheadTile = aheadRow * kTiles + firstTile + aheadPass * p.passTiles + aheadTurn * kSteps;
        }
    };
    auto fetchSlot = [&](uint32 slot) {
        if (aheadRow < rowTiles) {
            weights.fetch(slot, aheadTile, aheadRow, min(kSteps, ahead.width - aheadTurn * kSteps));
            aheadRow += ahead.rowStep, aheadTurn += ahead.turnStep;
            aheadTile += ahead.rowStep * kTiles + ahead.turnStep * kSteps;
            if (aheadTurn >= ahead.turns) {
                aheadTurn -= ahead.turns, ++aheadRow;
                aheadTile += kTiles - ahead.turns * kSteps;
            }
        }
        copyCommit();
    };
    uint32 filled = firstSlot;  // pinned below: NVRTC 13.0 builds no valid copy to an address that is partly uniform
    auto fetchSlots = [&](int count, bool skip) {
#pragma unroll 1
        for (int i = 0; i < count; ++i, filled = pinned(filled + slotBytes)) {
            if (skip) skipToWork();
            fetchSlot(filled);
        }
    };
    const int firstSlots = passes == 1 ? kFirstSlots : kDepth - 1;  // no calls while x is in registers
    fetchSlots(firstSlots, passes > 1);
    for (int i = threadIdx.x; i < rowTiles * kWarps * kTileSums; i += kThreads) sums[i] = 0.0f;
    // What is read behind the wait and at the end would come from memory. Before the wait, since writes meet in L2.
    const int prefetched = firstRowTile * kTileRows + threadIdx.x * kLineElements;
    if (prefetched < min(p.rows, (firstRowTile + rowTiles) * kTileRows)) {
        if (p.bias) prefetchL2(p.bias + prefetched);
        if (p.residual) prefetchL2(p.residual + prefetched);
    }
    if constexpr (kTokens == 1) {  // more rows would wait for each other's lines longer than this gains
        for (int i = threadIdx.x * kLineElements; i < p.columns; i += kThreads * kLineElements) {
            prefetchL2(p.x + size_t(firstToken) * p.columns + i);
        }
    }
    if (clusterBlocks() > 1) {
        if (threadIdx.x == 0) mailbox.prepare();
        mailbox.arrive();
    }
    allowNextKernel();
    Product product(lane, p.entries, groupBytes);
    waitForPriorKernels();  // from here on x may be read and y written

    const uint16* x = p.x + size_t(firstToken) * p.columns;
    Activations piece{min(kTokens, p.tokens - firstToken), firstTile * kTileColumns, p.columns, p.dtype, p.vectors,
                      Product::kHoldsWord};
    RawWord raw;
    if constexpr (Product::kHoldsWord) {
        const bool present = threadIdx.x < turns.turns * kSteps * kWordsPerTileRow;
        const int column = piece.column + threadIdx.x * kBitsPerWord;
        loadPairs(x + column, present ? p.columns - column : 0, p.vectors, raw.pairs);
        fetchSlots(kDepth - 1 - firstSlots, false);
    }

    uint32 slot = firstSlot, emptySlot = endSlot - slotBytes;
    for (int pass = 0; pass < passes; ++pass) {
        if (pass > 0) turns = passOf<kWarps, kSteps>(pass, p.passTiles, ownTiles);
        makeRecords<typename Product::Record, kTokens, Product::kSetRows>(
            x, piece, turns.turns * kSteps * kWordsPerTileRow, records, setBytes, raw);
        piece.column += p.passTiles * kTileColumns, piece.loaded = false;
        __syncthreads();

        constexpr uint32 kTurnBytes = kSteps * kRecord;
        const uint32 rowBytes = pinned(turns.turns * kTurnBytes), stepBytes = pinned(turns.turnStep * kTurnBytes);
        const uint32 endRecord = pinned(sharedAddress(records) + rowBytes);
        uint32 record = endRecord - rowBytes + turns.firstTurn * kTurnBytes;
        int rowTile = turns.firstRow, present = rowTile;  // present: the row tile that the sums belong to
        auto target = [&] { return sums + (present * kWarps + warp) * kTileSums; };
        float last[1][kLaneRows] = {};  // of the turn before
        while (rowTile < rowTiles) {
            copyWait<kDepth - 2>();
            __syncwarp();  // the slot filled next was read by every lane
            if (passes > 1) skipToWork();
            fetchSlot(emptySlot);
            if (!kEveryTurn && rowTile != present) {
                product.flush(target(), lane);
                present = rowTile;
            }
            product.multiplyTurn(slot, p.entries, record, setBytes);
            if constexpr (kEveryTurn) {
                flushQuads<1>(last, target(), lane);
                present = rowTile;
#pragma unroll
                for (int row = 0; row < kLaneRows; ++row) {
                    last[0][row] = product.sums[0][row];
                    product.sums[0][row] = 0.0f;
                }
            }
            emptySlot = slot;
            slot = slot + slotBytes == endSlot ? firstSlot : slot + slotBytes;
            rowTile += turns.rowStep, record += stepBytes;
            if (record >= endRecord) record -= rowBytes, ++rowTile;
        }
        if (present < rowTiles) {
            if constexpr (kEveryTurn) flushQuads<1>(last, target(), lane);
            else product.flush(target(), lane);
        }
        __syncthreads();
    }

    // What an element of the row tiles adds up to in this block, in warp order.
    auto blockSum = [&](int i) {
        const float* own = sums + i / kTileSums * kWarps * kTileSums + i % kTileSums;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) sum += own[w * kTileSums];
        return sum;
    };
    // Blocks of a cluster finish half of the elements each, and get what the other one has of them. What is read or worked
    // out again here is in no register until then.
    const uint32 blocks = clusterBlocks(), rank = clusterRank();
    const int elements = pinned(rowTiles) * kTileSums >> (blocks - 1), firstElement = rank * elements;
    float* received = sums + rowTiles * kWarps * kTileSums;
    if (blocks > 1) {
        mailbox.waitForOthers();
        if (threadIdx.x == 0) mailbox.expect(elements * sizeof(float));
        const int others = elements - firstElement;
#pragma unroll 1
        for (int i = threadIdx.x; i < elements; i += kThreads) {
            mailbox.send(sharedAddress(received + i), blockSum(others + i), rank ^ 1);
        }
    }
    for (int i = threadIdx.x; i < elements; i += kThreads) {
        const int place = firstElement + i, rowTile = place / kTileSums, element = place % kTileSums;
        const int n = (firstRowTile + rowTile) * kTileRows + element / kTokens, m = firstToken + element % kTokens;
        const bool inside = n < p.rows && m < p.tokens;  // records of tokens behind the last were never made
        const size_t output = size_t(m) * p.rows + n;
        const float shift = inside && p.bias ? shortToFloat(p.bias[n], p.dtype) : 0.0f;
        const float kept = inside && p.residual ? shortToFloat(p.residual[output], p.dtype) : 0.0f;
        float value = blockSum(place);
        if (blocks > 1) {
            mailbox.receive();  // what is sent is waited for, by some thread at least, also where all is outside
            value += received[i];
        }
        if (!inside) continue;
        value *= rowFactor<Product::kScaleBits>(p.factors, firstRowTile + rowTile, element / kTokens);
        p.y[output] = finished(p.bias ? value + shift : value, p.activation, p.residual, kept, p.dtype);
    }
}
