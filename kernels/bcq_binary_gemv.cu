// y[m][n] = bias[n] + sum_g sum_k x[m][k] * (sum_i scale_i (2 sign_i - 1) + offset),  m < 4 tokens      (nuQmm Eq 1)
// on binary tensor cores, for group_size a multiple of 32.
//
// x becomes 16 bit planes per segment (bcq_planes.cuh); the tensor core ANDs the sign bits of 16 weight rows with 8
// planes over 256 columns and counts, twice. Sign bits go from memory to the tensor core untouched (bcq_tiles.cuh).
// A lane of quad position t holds planes 2t, 2t + 1, 2t + 8, 2t + 9 of two rows; in units of 2^(2t)
//   sum_k x (2 sign - 1) = s * (2 v - P),   v = c_2t + 2 c_2t+1 + 256 c_2t+8 +- 512 c_2t+9,   P = v at sign = 1
// 2 v is made a float by integer addition to the bits of 1.5 * 2^23 (conversion instructions run on a slower unit), and
// one subtraction takes that constant and P away, exactly. The units are applied when a row tile ends.
//
// Grid: x = blocks, about one per multiprocessor, each a contiguous range of row tiles; y = groups of kTokens tokens.
// Inside a block the warps take turns, kSteps (row tile, k tile) positions each, so that together they read straight
// on: each streams its positions through its own ring of kDepth slots (cp.async), running ahead of everything else; the
// first slots are in flight while the planes are made. K too long for shared memory is taken in passes of `passTiles`
// k tiles. Every warp has its own sum of every row; they are added in warp order at the end: fp32, no atomics,
// repeatable bit for bit.
//
//   shared memory: ring [warp][kDepth][kSteps] {signs [plane][lane] uint4, scales [segment][g][entry][2] fp16}
//                  planes [token][k tile][lane] uint4 | meta [token][k tile][segment][t] float2
//                  sums [row tile][warp][row][token] fp32
#include "bcq_planes.cuh"
#include "mma.cuh"

namespace {

// A warp's walk over its turns: positions count the block's (row tile, k tile) of a pass, row by row.
template <int kWarps, int kSteps>
struct Walk {
    static constexpr int kStride = kWarps * kSteps;
    int rowTiles, kTiles, passTiles, passes, warp;
    int pass, width, position, end, rowTile, kTile;

    __device__ __forceinline__ void enter(int newPass) {
        pass = newPass;
        width = min(passTiles, kTiles - pass * passTiles);
        end = rowTiles * width;
        position = warp * kSteps;
        rowTile = 0;
        kTile = position;
        wrap();
    }
    __device__ __forceinline__ void nextTurn() {
        position += kStride;
        kTile += kStride;
        wrap();
    }
    __device__ __forceinline__ void wrap() {
        if (kTile < width) return;
        const int rows = kTile < 2 * width ? 1 : uint32(kTile) / uint32(width);
        rowTile += rows;
        kTile -= rows * width;
    }
    // To the next pass in which this warp has work, if any is left.
    __device__ __forceinline__ void skipEnded() {
        while (position >= end && pass + 1 < passes) enter(pass + 1);
    }
};

// Where the block's tiles are and how one gets into a slot.
template <int kBits, int kSegment>
struct Weights {
    static constexpr int kSegments = kTileColumns / kSegment;
    static constexpr int kSignVectors = kBits * kWarpSize;
    static constexpr int kMostScaleVectors = kSegments * (kBits + 1) * 2;
    const uint4* signs;   // of the block's first row tile, plus the lane
    const uint4* scales;  // of the block's first row tile
    int kTiles, groups, entries, lane;
    uint32 segmentsPerGroup, groupMagic;

    __device__ __forceinline__ int groupVectors() const { return entries * 2; }
    __device__ __forceinline__ int stepBytes() const { return (kSignVectors + kSegments * groupVectors()) * 16; }

    // Exact for every segment index below 2^16, that is K < 2^21.
    __device__ __forceinline__ int groupOf(uint32 segment) const {
        return min(segmentsPerGroup == 1 ? segment : __umulhi(segment, groupMagic), uint32(groups - 1));
    }

    __device__ __forceinline__ void fetchSigns(uint32 slot, const uint4* source) const {
#pragma unroll
        for (int i = 0; i < kBits; ++i) copyAsync16(slot + (i * kWarpSize + lane) * 16, source + i * kWarpSize);
    }

    // A slot of up to kSteps tiles from `position` on, where positions and groups follow each other in memory.
    template <int kSteps>
    __device__ __forceinline__ void fetchLinear(uint32 slot, int position, int count) const {
        const int scaleVectors = kSegments * groupVectors();
        const uint4* source = signs + size_t(position) * kSignVectors;
        const uint4* scaleSource = scales + size_t(position) * scaleVectors;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if (step < count) {
                fetchSigns(slot, source + step * kSignVectors);
#pragma unroll
                for (int first = 0; first < kMostScaleVectors; first += kWarpSize) {
                    const int vector = first + lane;
                    if (vector < scaleVectors) {
                        copyAsync16(slot + (kSignVectors + vector) * 16, scaleSource + step * scaleVectors + vector);
                    }
                }
            }
            slot += stepBytes();
        }
    }

    // One tile anywhere.
    __device__ __forceinline__ void fetchTile(uint32 slot, int rowTile, int kTile) const {
        fetchSigns(slot, signs + size_t(rowTile * kTiles + kTile) * kSignVectors);
#pragma unroll
        for (int segment = 0; segment < kSegments; ++segment) {
            const int group = groupOf(kTile * kSegments + segment);
            const uint4* source = scales + size_t(rowTile * groups + group) * groupVectors() + lane;
            const uint32 target = slot + (kSignVectors + segment * groupVectors() + lane) * 16;
            if (lane < groupVectors()) copyAsync16(target, source);
        }
    }
};

// Counts of sign bits over one segment: rows g and g + 8, planes 2t and 2t + 1 of the eight in `planes`.
template <int kSegment>
__device__ __forceinline__ void countBits(int (&counts)[4], uint4 signs, uint2 planes, int segment) {
    if constexpr (kSegment == kTileColumns) {
        binaryMma256(counts, make_uint4(signs.x, signs.z, signs.y, signs.w), planes.x, planes.y);
    } else {
        const bool upper = segment / (kTileColumns / 2 / kSegment);
        binaryMma128(counts, upper ? signs.y : signs.x, upper ? signs.w : signs.z, upper ? planes.y : planes.x);
    }
}

// The planes of x inside one segment: where a half tile holds several, the other lanes' words are cleared.
template <int kSegment>
__device__ __forceinline__ uint2 segmentPlanes(uint32 first, uint32 second, int segment, int quad) {
    if constexpr (kSegment * 2 >= kTileColumns) {
        return make_uint2(first, second);
    } else {
        constexpr int kPerHalf = kTileColumns / 2 / kSegment;
        const bool inside = quad / (kTileQuads / kPerHalf) == segment % kPerHalf;
        return make_uint2(inside ? first : 0, inside ? second : 0);
    }
}

constexpr int kMultiprocessorRegisters = 1 << 16;
constexpr int kEntryBytes = kLaneRows * sizeof(uint16);

// 2 v of one row as a float, kRoundToInteger too large: counts of planes 2t, 2t + 1 and 2t + 8, 2t + 9.
__device__ __forceinline__ float twiceCount(int low0, int low1, int high0, int high1, int signWeight) {
    const int high = high0 + signWeight * high1, low = low0 + kQuadLow1 * low1;
    return __int_as_float(high * (2 * kQuadHigh0) + int(kRoundToIntegerBits) + 2 * low);
}

// Add one tile's product to `sums` [token][row of the lane], in units of 2^(2t).
template <int kBits, int kSegment, int kTokens, int kUnroll>
__device__ __forceinline__ void multiplyTile(const unsigned char* slot, int scaleBytes, int entries,
                                             const uint4* planes, const float2* meta, int tokenPlanes, int tokenMeta,
                                             int lane, float (&sums)[kTokens][kLaneRows]) {
    const int quad = lane % kTileQuads, g = lane / kTileQuads;
    const int signWeight = quad == kTileQuads - 1 ? -2 : 2;  // plane 15 is the sign

    uint4 signs[kBits], x[kTokens];
#pragma unroll
    for (int i = 0; i < kBits; ++i) signs[i] = reinterpret_cast<const uint4*>(slot)[i * kWarpSize + lane];
#pragma unroll
    for (int m = 0; m < kTokens; ++m) x[m] = planes[m * tokenPlanes + lane];

#pragma unroll kUnroll
    for (int segment = 0; segment < kTileColumns / kSegment; ++segment) {
        const unsigned char* scaleSlot =
            slot + kBits * kWarpSize * sizeof(uint4) + segment * scaleBytes + g * entries * kEntryBytes;
        float2 about[kTokens];
        float part[kTokens][kLaneRows];
#pragma unroll
        for (int m = 0; m < kTokens; ++m) {
            about[m] = meta[m * tokenMeta + segment * kTileQuads + quad];
            part[m][0] = part[m][1] = 0.0f;
        }
        if (entries > kBits) {  // the offset times the sum of x, by every lane for its planes
            const uint32 offset = *reinterpret_cast<const uint32*>(scaleSlot + kBits * kEntryBytes);
#pragma unroll
            for (int m = 0; m < kTokens; ++m) {
                const float plain = about[m].y - kRoundToInteger;
                part[m][0] = halfToFloat(uint16(offset)) * plain;
                part[m][1] = halfToFloat(uint16(offset >> 16)) * plain;
            }
        }
#pragma unroll
        for (int i = 0; i < kBits; ++i) {
            const uint32 scale = *reinterpret_cast<const uint32*>(scaleSlot + i * kEntryBytes);
            const float scale0 = halfToFloat(uint16(scale)), scale1 = halfToFloat(uint16(scale >> 16));
#pragma unroll
            for (int m = 0; m < kTokens; ++m) {
                int low[4] = {0, 0, 0, 0}, high[4] = {0, 0, 0, 0};  // planes 0-7 and 8-15
                countBits<kSegment>(low, signs[i], segmentPlanes<kSegment>(x[m].x, x[m].z, segment, quad), segment);
                countBits<kSegment>(high, signs[i], segmentPlanes<kSegment>(x[m].y, x[m].w, segment, quad), segment);
                part[m][0] += scale0 * (twiceCount(low[0], low[1], high[0], high[1], signWeight) - about[m].y);
                part[m][1] += scale1 * (twiceCount(low[2], low[3], high[2], high[3], signWeight) - about[m].y);
            }
        }
#pragma unroll
        for (int m = 0; m < kTokens; ++m) {
            sums[m][0] += about[m].x * part[m][0];
            sums[m][1] += about[m].x * part[m][1];
        }
    }
}

// Sum over the planes (the lanes of a quad), add to `target` [row][token], start again at zero.
template <int kTokens>
__device__ __forceinline__ void flush(float (&sums)[kTokens][kLaneRows], float* target, int lane) {
    const int quad = lane % kTileQuads, g = lane / kTileQuads;
#pragma unroll
    for (int m = 0; m < kTokens; ++m) {
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r) {
            const float total = laneSum<1, kTileQuads>(sums[m][r] * float(1 << (2 * quad)));
            float* place = target + (g + r * (kTileRows / kLaneRows)) * kTokens + m;
            if (quad == 0) *place += total;
            sums[m][r] = 0.0f;
        }
    }
}

}  // namespace

template <int kBits,     // planes of the weight
          int kSegment,  // columns per activation scale: 32, 64, 128 or 256, a divisor of the group size
          int kTokens,   // rows of x at once
          int kWarps,    // warps per block
          int kSteps,    // tiles per slot of a warp's ring
          int kDepth>    // slots per ring
__global__ void __launch_bounds__(kWarps * kWarpSize, 1)
bcqBinaryGemv(const uint4* __restrict__ tiles,    // sign tiles
              const uint16* __restrict__ scales,  // scale tiles
              const uint16* __restrict__ x,       // [tokens, columns], fp16 or bf16
              const uint16* __restrict__ bias,    // [rows] in x's type, or null
              uint16* __restrict__ y,             // [tokens, rows]
              int tokens, int rows, int columns,
              int groups,                         // scale groups per row
              int segmentsPerGroup,               // group size / kSegment
              int entries,                        // kBits, or kBits + 1 with an offset
              int passTiles,                      // k tiles whose planes fit into shared memory at once
              int dtype,
              int vectors) {                      // x rows are 16-byte aligned and columns % 8 == 0
    static_assert(kDepth >= 2, "one slot is read while another is filled");
    static_assert(kTileColumns % kSegment == 0 && kSegment % kBitsPerWord == 0, "segments are whole words of a tile");
    constexpr int kThreads = kWarps * kWarpSize;
    // Segments interleaved: two where a thread's registers hold them.
    constexpr int kRegisters = kMultiprocessorRegisters / kThreads;
    constexpr bool kRoomy = kTokens > 1 ? kTokens * kBits <= 4 : kBits <= 4 && (kRegisters > 104 || kSegment >= 128);
    constexpr int kUnroll = kRoomy ? 2 : 1;
    constexpr int kTileMeta = kTileColumns / kSegment * kTileQuads;
    constexpr int kTileSums = kTileRows * kTokens;
    extern __shared__ __align__(16) unsigned char shared[];

    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const int allRowTiles = (rows + kTileRows - 1) / kTileRows;
    const int firstRowTile = uint32(allRowTiles) * blockIdx.x / gridDim.x;
    const int rowTiles = uint32(allRowTiles) * (blockIdx.x + 1) / gridDim.x - firstRowTile;
    const int kTiles = (columns + kTileColumns - 1) / kTileColumns;
    const int firstToken = blockIdx.y * kTokens;

    const Weights<kBits, kSegment> weights{
        tiles + size_t(firstRowTile) * kTiles * (kBits * kWarpSize) + lane,
        reinterpret_cast<const uint4*>(scales) + size_t(firstRowTile) * groups * (entries * 2),
        kTiles, groups, entries, lane, uint32(segmentsPerGroup), 0xffffffffu / uint32(segmentsPerGroup) + 1};
    const bool linear = passTiles >= kTiles && segmentsPerGroup == 1 && groups == kTiles * weights.kSegments;
    const int stepBytes = weights.stepBytes(), scaleBytes = weights.groupVectors() * 16;
    unsigned char* ring = shared + warp * (kDepth * kSteps * stepBytes);
    uint4* planes = reinterpret_cast<uint4*>(shared + kWarps * kDepth * kSteps * stepBytes);
    float2* meta = reinterpret_cast<float2*>(planes + kTokens * passTiles * kWarpSize);
    float* sums = reinterpret_cast<float*>(meta + kTokens * passTiles * kTileMeta);

    using Turns = Walk<kWarps, kSteps>;
    Turns ahead{rowTiles, kTiles, passTiles, (kTiles + passTiles - 1) / passTiles, warp};
    ahead.enter(0);
    auto fetchSlot = [&](int slot) {
        const uint32 target = sharedAddress(ring + slot * kSteps * stepBytes);
        if (linear) {
            weights.template fetchLinear<kSteps>(target, ahead.position, ahead.end - ahead.position);
            ahead.position += Turns::kStride;
        } else {
            ahead.skipEnded();
            int rowTile = ahead.rowTile, kTile = ahead.kTile;
#pragma unroll 1
            for (int step = 0; step < min(kSteps, ahead.end - ahead.position); ++step) {
                weights.fetchTile(target + step * stepBytes, rowTile, ahead.pass * passTiles + kTile);
                if (++kTile == ahead.width) kTile = 0, ++rowTile;
            }
            ahead.nextTurn();
        }
        copyCommit();
    };
#pragma unroll 1
    for (int slot = 0; slot < kDepth - 1; ++slot) fetchSlot(slot);
    for (int i = threadIdx.x; i < rowTiles * kWarps * kTileSums; i += kThreads) sums[i] = 0.0f;
    allowNextKernel();
    waitForPriorKernels();  // from here on x may be read and y written

    Turns walk = ahead;
    float own[kTokens][kLaneRows] = {};
    int slot = 0;
    for (int pass = 0; pass < ahead.passes; ++pass) {
        walk.enter(pass);
        for (int m = 0; m < kTokens; ++m) {
            const bool exists = firstToken + m < tokens;
            makePlanes<kSegment>(x + size_t(exists ? firstToken + m : 0) * columns, pass * passTiles * kTileColumns,
                                 exists ? columns : 0, walk.width, dtype, vectors,
                                 planes + m * passTiles * kWarpSize, meta + m * passTiles * kTileMeta);
        }
        __syncthreads();

        int present = walk.rowTile;  // the row tile that `own` belongs to
        auto flushPresent = [&] { flush<kTokens>(own, sums + (present * kWarps + warp) * kTileSums, lane); };
        for (; walk.position < walk.end; walk.nextTurn()) {
            copyWait<kDepth - 2>();
            __syncwarp();  // the slot filled next was read by every lane
            fetchSlot(slot == 0 ? kDepth - 1 : slot - 1);
            int rowTile = walk.rowTile, kTile = walk.kTile;
#pragma unroll 1
            for (int step = 0; step < min(kSteps, walk.end - walk.position); ++step) {
                if (rowTile != present) {
                    flushPresent();
                    present = rowTile;
                }
                multiplyTile<kBits, kSegment, kTokens, kUnroll>(
                    ring + (slot * kSteps + step) * stepBytes, scaleBytes, entries, planes + kTile * kWarpSize,
                    meta + kTile * kTileMeta, passTiles * kWarpSize, passTiles * kTileMeta, lane, own);
                if (++kTile == walk.width) kTile = 0, ++rowTile;
            }
            slot = slot + 1 == kDepth ? 0 : slot + 1;
        }
        if (present < rowTiles) flushPresent();
        __syncthreads();
    }

    for (int i = threadIdx.x; i < rowTiles * kTileSums; i += kThreads) {
        const int rowTile = i / kTileSums, element = i % kTileSums;
        const int n = (firstRowTile + rowTile) * kTileRows + element / kTokens, m = firstToken + element % kTokens;
        float value = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) value += sums[(rowTile * kWarps + w) * kTileSums + element];
        if (n < rows && m < tokens) {
            if (bias) value += shortToFloat(bias[n], dtype);
            y[size_t(m) * rows + n] = floatToShort(value, dtype);
        }
    }
}
