// y[m][n] = bias[n] + sum_g sum_k x[m][k] * (sum_i scale_i (2 sign_i - 1) + offset),  m < 4 tokens      (nuQmm Eq 1)
// on binary tensor cores, for group_size a multiple of 32.
//
// x becomes 16 bit planes per segment (bcq_planes.cuh); the tensor core ANDs 16 planes x 256 columns with the sign
// bits of 8 weight rows and counts. Sign bits go from memory to the tensor core untouched (bcq_tiles.cuh). Per segment
//   sum_k x (2 sign - 1) = s * sum_p 2^p (2 count_p) - s * sum(codes)           with -2^15 in place of 2^15
// A lane holds planes g and g + 8, so 2^(g + 1) is common to all that it sums: applied once, when a row tile ends.
//
// Grid: x = blocks, about one per multiprocessor, each a contiguous range of row tiles; y = groups of kTokens tokens.
// Inside a block every warp takes an equal, contiguous share of (row tile, k tile) positions and streams it through
// its own ring of kDepth slots of kSteps tiles (cp.async), running ahead of everything else: the first slots are in
// flight while the planes are made. K too long for shared memory is taken in passes of `passTiles` k tiles.
// Partial row tiles meet in shared memory and are added in warp order: fp32, no atomics, repeatable bit for bit.
//
//   shared memory: ring [warp][kDepth][kSteps] {signs [plane][lane] uint4, scales [segment][t][entry][4] fp16}
//                  planes [token][k tile][lane] uint4 | meta [token][k tile][segment] float2
//                  sums [row tile][row][token] | partials [warp][2][row][token] fp32
#include "bcq_planes.cuh"
#include "mma.cuh"

namespace {

// A warp's walk over its share of the block's positions, pass after pass.
template <int kWarps>
struct Walk {
    int rowTiles, kTiles, passTiles, passes, warp;
    int pass, width, position, end, rowTile, kTile;

    __device__ __forceinline__ void enter(int newPass) {
        pass = newPass;
        width = min(passTiles, kTiles - pass * passTiles);
        const int total = rowTiles * width;
        position = total * warp / kWarps;
        end = total * (warp + 1) / kWarps;
        rowTile = position / width;
        kTile = position % width;
    }
    __device__ __forceinline__ void next() {
        ++position;
        if (++kTile == width) {
            kTile = 0;
            ++rowTile;
        }
    }
    // To the next pass in which this warp has work, if any is left.
    __device__ __forceinline__ void skipEnded() {
        while (position >= end && pass + 1 < passes) enter(pass + 1);
    }
};

template <int kBits, int kSegment, int kTokens>
struct Weights {  // what is the same for every tile
    static constexpr int kSegments = kTileColumns / kSegment;
    const uint4* tiles;
    const uint16* scales;
    int firstRowTile, kTiles, groups, entries;
    uint32 segmentsPerGroup, groupMagic;

    __device__ __forceinline__ int stepBytes() const {
        return kBits * kWarpSize * int(sizeof(uint4)) + kSegments * scaleBytes();
    }
    __device__ __forceinline__ int scaleBytes() const { return kTileRows * entries * int(sizeof(uint16)); }

    // Exact for every segment index below 2^16, that is K < 2^21.
    __device__ __forceinline__ int groupOf(uint32 segment) const {
        return min(segmentsPerGroup == 1 ? segment : __umulhi(segment, groupMagic), uint32(groups - 1));
    }

    // Start copying one tile's signs and scales into a slot.
    __device__ __forceinline__ void fetch(uint32 slot, int rowTile, int kTile, int lane) const {
        const size_t tileRow = firstRowTile + rowTile;
        const uint4* signs = tiles + (tileRow * kTiles + kTile) * kBits * kWarpSize + lane;
#pragma unroll
        for (int i = 0; i < kBits; ++i) copyAsync16(slot + (i * kWarpSize + lane) * 16, signs + i * kWarpSize);
        // Two segments at a time, half a warp each, where the entries of one fit into 16 vectors.
        constexpr int kAtOnce = kBits < MAX_HALF_WARP_BITS && kSegments > 1 ? 2 : 1;
        const int vectors = scaleBytes() / 16;
        const int vector = kAtOnce == 2 ? lane % 16 : lane;
#pragma unroll
        for (int first = 0; first < kSegments; first += kAtOnce) {
            const int segment = first + (kAtOnce == 2 ? lane / 16 : 0);
            const size_t group = groupOf(kTile * kSegments + segment);
            const uint16* source = scales + (tileRow * groups + group) * entries * kTileRows + vector * 8;
            const uint32 target = slot + kBits * kWarpSize * 16 + segment * scaleBytes() + vector * 16;
            if (vector < vectors) copyAsync16(target, source);
        }
    }
    static constexpr int MAX_HALF_WARP_BITS = 8;  // entries <= 8, two vectors each
};

template <int kSegment>
__device__ __forceinline__ void countBits(int (&counts)[4], uint4 planes, uint2 signs, int segment, int quad) {
    if constexpr (kSegment == kTileColumns) {
        binaryMma256(counts, planes, signs.x, signs.y);
    } else {
        constexpr int kPerHalf = kTileColumns / 2 / kSegment;
        constexpr int kQuads = kTileQuads / kPerHalf;  // quads (32 columns each) per segment
        const bool upper = segment / kPerHalf;
        const bool inside = quad / kQuads == segment % kPerHalf;
        const uint32 low = upper ? planes.z : planes.x, high = upper ? planes.w : planes.y;
        binaryMma128(counts, inside ? low : 0, inside ? high : 0, upper ? signs.y : signs.x);
    }
}

__device__ __forceinline__ void unpackScales(const unsigned char* entry, float (&scales)[kQuadRows]) {
    const uint2 raw = *reinterpret_cast<const uint2*>(entry);
    scales[0] = halfToFloat(uint16(raw.x));
    scales[1] = halfToFloat(uint16(raw.x >> 16));
    scales[2] = halfToFloat(uint16(raw.y));
    scales[3] = halfToFloat(uint16(raw.y >> 16));
}

constexpr int kEntriesAtOnce = 8;                     // values of g: one scale entry per lane of a quad
constexpr int kEntryBytes = kQuadRows * sizeof(uint16);

// Add one tile's product to `sums` [token][row of the quad], in units of 2^(g + 1).
template <int kBits, int kSegment, int kTokens>
__device__ __forceinline__ void multiplyTile(const unsigned char* slot, int scaleBytes, int entries,
                                             const uint4* planes, const float2* meta, int tokenPlanes, int tokenMeta,
                                             int lane, float (&sums)[kTokens][kQuadRows]) {
    constexpr int kRounds = (kBits + kEntriesAtOnce) / kEntriesAtOnce;
    const int quad = lane % kTileQuads, g = lane / kTileQuads;
    const int highPlane = g == kEntriesAtOnce - 1 ? -256 : 256;  // plane 15 is the sign
    const float unit = 1.0f / float(2 << g);

    uint4 signs[kBits], x[kTokens];
#pragma unroll
    for (int i = 0; i < kBits; ++i) signs[i] = reinterpret_cast<const uint4*>(slot)[i * kWarpSize + lane];
#pragma unroll
    for (int m = 0; m < kTokens; ++m) x[m] = planes[m * tokenPlanes + lane];

#pragma unroll kTokens == 1 ? 4 : kBits > 4 ? 1 : 2  // more would not fit into the registers
    for (int segment = 0; segment < kTileColumns / kSegment; ++segment) {
        const unsigned char* scaleSlot =
            slot + kBits * kWarpSize * sizeof(uint4) + segment * scaleBytes + quad * entries * kEntryBytes;
        float2 about[kTokens];
        float part[kTokens][kQuadRows];
#pragma unroll
        for (int m = 0; m < kTokens; ++m) {
            about[m] = meta[m * tokenMeta + segment];
#pragma unroll
            for (int r = 0; r < kQuadRows; ++r) part[m][r] = 0.0f;
        }
        // (offset - sum of the scales) * sum(codes), shared out: lane g takes entry g.
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
            const int entry = round * kEntriesAtOnce + g;
            const float weight = entry >= entries ? 0.0f : entry < kBits ? -unit : unit;
            float scale[kQuadRows];
            unpackScales(scaleSlot + min(entry, entries - 1) * kEntryBytes, scale);
#pragma unroll
            for (int m = 0; m < kTokens; ++m) {
#pragma unroll
                for (int r = 0; r < kQuadRows; ++r) part[m][r] += scale[r] * (about[m].y * weight);
            }
        }
#pragma unroll
        for (int i = 0; i < kBits; ++i) {
            float scale[kQuadRows];
            unpackScales(scaleSlot + i * kEntryBytes, scale);
#pragma unroll
            for (int m = 0; m < kTokens; ++m) {
                int upper[4] = {0, 0, 0, 0}, lower[4] = {0, 0, 0, 0};  // rows 0-7 and 8-15 of the tile
                countBits<kSegment>(upper, x[m], make_uint2(signs[i].x, signs[i].y), segment, quad);
                countBits<kSegment>(lower, x[m], make_uint2(signs[i].z, signs[i].w), segment, quad);
                part[m][0] += scale[0] * float(upper[0] + highPlane * upper[2]);
                part[m][1] += scale[1] * float(upper[1] + highPlane * upper[3]);
                part[m][2] += scale[2] * float(lower[0] + highPlane * lower[2]);
                part[m][3] += scale[3] * float(lower[1] + highPlane * lower[3]);
            }
        }
#pragma unroll
        for (int m = 0; m < kTokens; ++m) {
#pragma unroll
            for (int r = 0; r < kQuadRows; ++r) sums[m][r] += about[m].x * part[m][r];
        }
    }
}

// Sum over the planes (lanes of equal t), hand over to `target` [row][token], start again at zero.
template <int kTokens>
__device__ __forceinline__ void flush(float (&sums)[kTokens][kQuadRows], float* target, bool add, int lane) {
    const int quad = lane % kTileQuads, g = lane / kTileQuads;
#pragma unroll
    for (int m = 0; m < kTokens; ++m) {
#pragma unroll
        for (int r = 0; r < kQuadRows; ++r) {
            const float total = laneSum<kTileQuads, kWarpSize>(sums[m][r] * float(2 << g));
            float* place = target + (2 * quad + r % 2 + r / 2 * 8) * kTokens + m;
            if (g == 0) *place = add ? *place + total : total;
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
    constexpr int kSegments = kTileColumns / kSegment;
    constexpr int kTileSums = kTileRows * kTokens;
    extern __shared__ __align__(16) unsigned char shared[];

    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const int allRowTiles = (rows + kTileRows - 1) / kTileRows;
    const int firstRowTile = int(size_t(allRowTiles) * blockIdx.x / gridDim.x);
    const int rowTiles = int(size_t(allRowTiles) * (blockIdx.x + 1) / gridDim.x) - firstRowTile;
    const int kTiles = (columns + kTileColumns - 1) / kTileColumns;
    const int firstToken = blockIdx.y * kTokens;

    Weights<kBits, kSegment, kTokens> weights{tiles, scales, firstRowTile, kTiles, groups, entries,
                                              uint32(segmentsPerGroup), 0xffffffffu / uint32(segmentsPerGroup) + 1};
    const int stepBytes = weights.stepBytes();
    unsigned char* ring = shared + warp * (kDepth * kSteps * stepBytes);
    uint4* planes = reinterpret_cast<uint4*>(shared + kWarps * kDepth * kSteps * stepBytes);
    float2* meta = reinterpret_cast<float2*>(planes + kTokens * passTiles * kWarpSize);
    float* sums = reinterpret_cast<float*>(meta + kTokens * passTiles * kSegments);
    float* partials = sums + rowTiles * kTileSums;

    Walk<kWarps> ahead{rowTiles, kTiles, passTiles, (kTiles + passTiles - 1) / passTiles, warp};
    ahead.enter(0);
    auto fetchSlot = [&](int slot) {
        ahead.skipEnded();
        const uint32 target = sharedAddress(ring + slot * kSteps * stepBytes);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            if (ahead.position >= ahead.end) break;
            weights.fetch(target + step * stepBytes, ahead.rowTile, ahead.pass * passTiles + ahead.kTile, lane);
            ahead.next();
        }
        copyCommit();
    };
#pragma unroll 1
    for (int slot = 0; slot < kDepth - 1; ++slot) fetchSlot(slot);
    for (int i = threadIdx.x; i < rowTiles * kTileSums; i += kThreads) sums[i] = 0.0f;
    waitForPriorKernels();  // from here on x may be read and y written

    Walk<kWarps> walk = ahead;
    float own[kTokens][kQuadRows] = {};
    int slot = 0;
    for (int pass = 0; pass < ahead.passes; ++pass) {
        walk.enter(pass);
        for (int m = 0; m < kTokens; ++m) {
            const bool exists = firstToken + m < tokens;
            makePlanes<kSegment>(x + size_t(exists ? firstToken + m : 0) * columns, pass * passTiles * kTileColumns,
                                 exists ? columns : 0, walk.width, dtype, vectors,
                                 planes + m * passTiles * kWarpSize, meta + m * passTiles * kSegments);
        }
        __syncthreads();

        int startTile = walk.kTile;  // where this warp began the present row tile
        while (walk.position < walk.end) {
            copyWait<kDepth - 2>();
            __syncwarp();  // the slot filled next was read by every lane
            fetchSlot(slot == 0 ? kDepth - 1 : slot - 1);
#pragma unroll 1
            for (int step = 0; step < kSteps && walk.position < walk.end; ++step, walk.next()) {
                multiplyTile<kBits, kSegment, kTokens>(ring + (slot * kSteps + step) * stepBytes,
                                                       weights.scaleBytes(), entries,
                                                       planes + walk.kTile * kWarpSize, meta + walk.kTile * kSegments,
                                                       passTiles * kWarpSize, passTiles * kSegments, lane, own);
                const bool rowEnds = walk.kTile + 1 == walk.width;
                if (rowEnds || walk.position + 1 == walk.end) {
                    const bool whole = rowEnds && startTile == 0;
                    float* partial = partials + (2 * warp + (startTile == 0)) * kTileSums;
                    flush<kTokens>(own, whole ? sums + walk.rowTile * kTileSums : partial, whole, lane);
                    startTile = 0;
                }
            }
            slot = slot + 1 == kDepth ? 0 : slot + 1;
        }
        __syncthreads();

        const int total = rowTiles * walk.width;
        const bool last = pass + 1 == ahead.passes;
        if (last) allowNextKernel();
        for (int i = threadIdx.x; i < rowTiles * kTileSums; i += kThreads) {
            const int rowTile = i / kTileSums, begin = rowTile * walk.width, end = begin + walk.width;
            float value = sums[i];
            for (int w = 0; w < kWarps; ++w) {
                const int wBegin = total * w / kWarps, wEnd = total * (w + 1) / kWarps;
                const bool touches = wBegin < end && wEnd > begin && wBegin < wEnd;
                if (touches && !(wBegin <= begin && wEnd >= end)) {
                    value += partials[(2 * w + (wBegin <= begin)) * kTileSums + i % kTileSums];
                }
            }
            const int n = (firstRowTile + rowTile) * kTileRows + i % kTileSums / kTokens;
            const int m = firstToken + i % kTokens;
            if (!last) {
                sums[i] = value;
            } else if (n < rows && m < tokens) {
                if (bias) value += shortToFloat(bias[n], dtype);
                y[size_t(m) * rows + n] = floatToShort(value, dtype);
            }
        }
    }
}
