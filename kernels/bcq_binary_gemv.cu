// y[m][n] = bias[n] + sum_g sum_k x[m][k] * (sum_i scale_i (2 sign_i - 1) + offset),  m < 4 tokens      (nuQmm Eq 1)
// on binary tensor cores, for group_size a multiple of 32.
//
// x becomes 16 bit planes per segment (bcq_planes.cuh), x ~ s c with codes c. Sign bits go from memory to the tensor
// core untouched (bcq_tiles.cuh), and two products with tensor cores make one number per row, segment and plane i:
//   binary   counts[row][p] = popcount(signs & plane p of the codes): 16 rows, 8 planes per instruction
//   fp16     v[row][j] = sum_p counts[row][p] 2^p (-2^15 for p = 15), the sum of the codes where the sign is 1
// A pair of counts, each below 2^10, is a pair of fp16 as it is: the denormal numbers count * 2^-24. The second product
// has eight columns and a (segment, plane i) needs one, so eight of those, a batch, share its sums; each brings a
// matrix that is zero but for column j. Sums stay below 2^24 and are exact. A lane then holds two rows of two columns:
//   sum_k x (2 sign - 1) = s * (2 v - P),   P = sum of the segment's codes
//
// Grid: x = blocks, about one per multiprocessor, each a contiguous range of row tiles; y = groups of kTokens tokens.
// Inside a block the warps take turns, up to kSteps neighbouring k tiles of one row tile each, so that together they
// read straight on: each streams its turns through its own ring of kDepth slots (cp.async), running ahead of everything
// else; the first slots are in flight while the planes are made. Two resident blocks of successive launches per
// multiprocessor (kResident = 2) let the next kernel's slots fill while this one ends. K too long for shared memory is
// taken in passes of `passTiles` k tiles. Every warp has its own sum of every row; they are added in warp order at the
// end: fp32, no atomics, repeatable bit for bit. Where rows are long, a cluster of blocks shares a range of row tiles, so
// that each makes the planes of a part of x only; they add their sums through each other's memory.
//
//   shared memory: ring [warp][kDepth] {signs [step][plane][lane] uint4, scales [step][segment][g][entry][2]}
//                  records [token][k tile] of planes (bcq_planes.cuh)
//                  sums [row tile][warp][row][token] fp32
#include "bcq_binary_turn.cuh"
#include "finish.cuh"

namespace {

constexpr int kLineBytes = 128, kLineElements = kLineBytes / sizeof(uint16);

// How the warps of a block take turns in one pass: turns per row tile, and from a warp's turn to its next.
struct Pass {
    int width, turns, firstRow, firstTurn, rowStep, turnStep;
};

template <int kWarps, int kSteps>
__device__ __noinline__ Pass passOf(int pass, int passTiles, int kTiles) {
    const int width = min(passTiles, kTiles - pass * passTiles), warp = threadIdx.x / kWarpSize;
    const int turns = (width + kSteps - 1) / kSteps;
    return {width, turns, warp / turns, warp % turns, kWarps / turns, kWarps % turns};
}

// Where the block's tiles are and how a turn gets into a slot.
template <int kBits, int kSegment, int kScaleBits, int kSteps>
struct Weights {
    using S = Shape<kBits, kSegment, kScaleBits, kSteps>;
    static constexpr int kMostScaleVectors = S::kTurnSegments * (kBits + 1) * S::kEntryBytes / kLaneRows;
    const uint4* signs;   // of the block's first row tile, plus the lane
    const uint4* scales;  // of the block's first row tile
    uint32 kTiles, groups, groupVectors, lane, segmentsPerGroup, groupMagic, vectorMagic;
    bool linear;          // one group per segment, all stored: scales follow each other as the tiles do

    // Exact for every segment index below 2^16, that is K < 2^21.
    __device__ __forceinline__ uint32 groupOf(uint32 segment) const {
        return min(segmentsPerGroup == 1 ? segment : __umulhi(segment, groupMagic), groups - 1);
    }
    // Tiles `tile` .. of row tile `rowTile`, counted through the block. Scales behind the last are zeros.
    __device__ __forceinline__ void fetch(uint32 slot, uint32 tile, uint32 rowTile, uint32 steps) const {
        const uint4* source = signs + size_t(tile) * S::kSignVectors;
        const uint32 target = slot + lane * kVectorBytes;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if (step < steps) {
#pragma unroll
                for (int i = 0; i < kBits; ++i) {
                    const int vector = step * S::kSignVectors + i * kWarpSize;
                    copyAsync16(target + vector * kVectorBytes, source + vector);
                }
            }
        }
        const uint32 segments = kSteps == 1 ? S::kTurnSegments : steps * S::kTileSegments;
        const uint32 firstSegment = (tile - rowTile * kTiles) * S::kTileSegments;
#pragma unroll
        for (int first = 0; first < kMostScaleVectors; first += kWarpSize) {
            const uint32 vector = first + lane;
            uint32 index = tile * S::kTileSegments * groupVectors + vector;
            if (!linear) {
                const uint32 segment = vector * vectorMagic >> 16;  // vector / groupVectors
                index = (rowTile * groups + groupOf(firstSegment + segment) - segment) * groupVectors + vector;
            }
            const bool present = vector < segments * groupVectors;
            if (vector < S::kTurnSegments * groupVectors) {
                copyAsync16Or0(target + S::kSignBytes + first * kVectorBytes, scales + (present ? index : 0), present);
            }
        }
    }
};

}  // namespace

template <int kBits,      // planes of the weight
          int kSegment,   // columns per activation scale: 32, 64, 128 or 256, a divisor of the group size
          int kScaleBits, // of a scale and of an offset: 16, fp16, or 8
          int kTokens,    // rows of x at once
          int kWarps,     // warps per block
          int kSteps,     // tiles per slot of a warp's ring
          int kDepth,     // slots per ring
          int kResident>  // blocks that a multiprocessor holds at once
__global__ void __launch_bounds__(kWarps * kWarpSize, kResident)
bcqBinaryGemv(const uint4* __restrict__ tiles,    // sign tiles
              const void* __restrict__ scales,    // scale tiles
              const uint16* __restrict__ factors, // factor tiles, or null with fp16 scales
              const uint16* __restrict__ x,       // [tokens, columns], fp16 or bf16
              const uint16* __restrict__ bias,    // [rows] in x's type, or null
              const uint16* residual,             // [tokens, rows], added to the result, or null
              uint16* __restrict__ y,             // [tokens, rows]
              int tokens, int rows, int columns,
              int groups,                         // scale groups per row
              int segmentsPerGroup,               // group size / kSegment
              int entries,                        // kBits, or kBits + 1 with an offset
              int passTiles,                      // k tiles whose planes fit into shared memory at once; whole turns
              int dtype,
              int activation,                     // of activation.cuh, or kNoActivation; before the residual is added
              int vectors) {                      // x rows are 16-byte aligned and columns % 8 == 0
    static_assert(kDepth >= 2, "one slot is read while another is filled");
    static_assert(kTileColumns % kSegment == 0 && kSegment % kBitsPerWord == 0, "segments are whole words of a tile");
    using S = Shape<kBits, kSegment, kScaleBits, kSteps>;
    constexpr int kThreads = kWarps * kWarpSize, kRecord = recordBytes<kSegment>(), kTileSums = kTileRows * kTokens;
    extern __shared__ __align__(16) unsigned char shared[];

    const int lane = pinned(threadIdx.x % kWarpSize), warp = pinned(threadIdx.x / kWarpSize);
    const int allRowTiles = (rows + kTileRows - 1) / kTileRows;
    const uint32 parts = clusterBlocks(), part = clusterRank(), ranges = gridDim.x / parts, range = blockIdx.x / parts;
    const int firstRowTile = uint32(allRowTiles) * range / ranges;
    const int rowTiles = uint32(allRowTiles) * (range + 1) / ranges - firstRowTile;
    const int kTiles = (columns + kTileColumns - 1) / kTileColumns;
    const int firstTile = uint32(kTiles) * part / parts, ownTiles = uint32(kTiles) * (part + 1) / parts - firstTile;
    const int passes = (ownTiles + passTiles - 1) / passTiles;
    const int firstToken = blockIdx.y * kTokens;
    const uint32 groupVectors = entries * S::kEntryBytes / kLaneRows, groupBytes = groupVectors * kVectorBytes;

    const Weights<kBits, kSegment, kScaleBits, kSteps> weights{
        pinned(tiles + size_t(firstRowTile) * kTiles * S::kSignVectors + lane),
        pinned(static_cast<const uint4*>(scales) + size_t(firstRowTile) * groups * groupVectors),
        uint32(kTiles), uint32(groups), groupVectors, uint32(lane), uint32(segmentsPerGroup),
        0xffffffffu / uint32(segmentsPerGroup) + 1, (1u << 16) / groupVectors + 1,
        segmentsPerGroup == 1 && groups == kTiles * S::kTileSegments};
    const uint32 slotBytes = pinned(S::kSignBytes + S::kTurnSegments * groupBytes), ringBytes = kDepth * slotBytes;
    const uint32 firstSlot = pinned(sharedAddress(shared) + warp * ringBytes), endSlot = pinned(firstSlot + ringBytes);
    unsigned char* records = shared + kWarps * ringBytes;
    const uint32 tokenBytes = passTiles * kRecord;
    float* sums = reinterpret_cast<float*>(records + kTokens * tokenBytes);

    // The turn fetched next: its pass, row tile, place in the row, first tile counted through the block.
    Pass ahead = passOf<kWarps, kSteps>(0, passTiles, ownTiles);
    int aheadPass = 0, aheadRow = ahead.firstRow, aheadTurn = ahead.firstTurn;
    uint32 aheadTile = aheadRow * kTiles + firstTile + aheadTurn * kSteps;
    auto fetchSlot = [&](uint32 slot) {
        while (aheadRow >= rowTiles && aheadPass + 1 < passes) {
            ahead = passOf<kWarps, kSteps>(++aheadPass, passTiles, ownTiles);
            aheadRow = ahead.firstRow, aheadTurn = ahead.firstTurn;
            aheadTile = aheadRow * kTiles + firstTile + aheadPass * passTiles + aheadTurn * kSteps;
        }
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
#pragma unroll 1
    for (int slot = 0; slot < kDepth - 1; ++slot) fetchSlot(firstSlot + slot * slotBytes);
    for (int i = threadIdx.x; i < rowTiles * kWarps * kTileSums; i += kThreads) sums[i] = 0.0f;
    // What is read at the end would come from memory then. Before the wait, since writes meet in L2.
    const int prefetched = firstRowTile * kTileRows + threadIdx.x * kLineElements;
    if (prefetched < min(rows, (firstRowTile + rowTiles) * kTileRows)) {
        if (bias) prefetchL2(bias + prefetched);
        if (residual) prefetchL2(residual + prefetched);
    }
    allowNextKernel();
    waitForPriorKernels();  // from here on x may be read and y written

    const Lane<kBits, kSegment, kScaleBits, kSteps> own(lane, entries, groupBytes);
    float ownSums[kTokens][kLaneRows] = {};
    uint32 slot = firstSlot, emptySlot = endSlot - slotBytes;
    for (int pass = 0; pass < passes; ++pass) {
        const Pass turns = passOf<kWarps, kSteps>(pass, passTiles, ownTiles);
        for (int m = 0; m < kTokens; ++m) {
            const bool exists = firstToken + m < tokens;
            makePlanes<kSegment>(x + size_t(exists ? firstToken + m : 0) * columns,
                                 (firstTile + pass * passTiles) * kTileColumns, exists ? columns : 0,
                                 turns.turns * kSteps, dtype, vectors, records + m * tokenBytes);
        }
        __syncthreads();

        constexpr uint32 kTurnBytes = kSteps * kRecord;
        const uint32 rowBytes = pinned(turns.turns * kTurnBytes), stepBytes = pinned(turns.turnStep * kTurnBytes);
        const uint32 endRecord = pinned(sharedAddress(records) + rowBytes);
        uint32 record = endRecord - rowBytes + turns.firstTurn * kTurnBytes;
        int rowTile = turns.firstRow, present = rowTile;  // present: the row tile that ownSums belongs to
        auto flushPresent = [&] { flush<kTokens>(ownSums, sums + (present * kWarps + warp) * kTileSums, lane); };
        while (rowTile < rowTiles) {
            copyWait<kDepth - 2>();
            __syncwarp();  // the slot filled next was read by every lane
            fetchSlot(emptySlot);
            if (rowTile != present) {
                flushPresent();
                present = rowTile;
            }
            multiplyTurn<kBits, kSegment, kScaleBits, kSteps, kTokens>(slot, entries, record, tokenBytes, own, ownSums);
            emptySlot = slot;
            slot = slot + slotBytes == endSlot ? firstSlot : slot + slotBytes;
            rowTile += turns.rowStep, record += stepBytes;
            if (record >= endRecord) record -= rowBytes, ++rowTile;
        }
        if (present < rowTiles) flushPresent();
        __syncthreads();
    }

    if (parts > 1) clusterBarrier();
    for (int i = part * kThreads + threadIdx.x; i < rowTiles * kTileSums; i += parts * kThreads) {
        const int rowTile = i / kTileSums, element = i % kTileSums;
        const int n = (firstRowTile + rowTile) * kTileRows + element / kTokens, m = firstToken + element % kTokens;
        const bool inside = n < rows && m < tokens;
        const size_t place = size_t(m) * rows + n;
        const float shift = inside && bias ? shortToFloat(bias[n], dtype) : 0.0f;
        const float kept = inside && residual ? shortToFloat(residual[place], dtype) : 0.0f;
        float value = 0.0f;
        const float* own = sums + rowTile * kWarps * kTileSums + element;
        if (parts == 1) {
#pragma unroll
            for (int w = 0; w < kWarps; ++w) value += own[w * kTileSums];
        } else {
            for (uint32 rank = 0; rank < parts; ++rank) {
#pragma unroll
                for (int w = 0; w < kWarps; ++w) value += loadClusterFloat(sharedAddress(own + w * kTileSums), rank);
            }
        }
        if (inside) {
            value *= rowFactor<kScaleBits>(factors, firstRowTile + rowTile, element / kTokens);
            y[place] = finished(bias ? value + shift : value, activation, residual, kept, dtype);
        }
    }
    if (parts > 1) clusterBarrier();  // until the others have read this block's sums
}
