// y[m][n] = bias[n] + sum_g sum_k x[m][k] * (sum_i scale_i (2 sign_i - 1) + offset)      (nuQmm sections 3.2, 3.3)
// through look-up tables of mu = 8 activations, for any group_size that is a multiple of 8.
//
// A table holds, for one byte of sign bits, the sum of eight activations with those signs: 256 fp32 values, 1 KB. A
// block builds the tables of its k tiles in shared memory, then its warps walk the block's row tiles: every sign byte
// of the prepared order (bcq_tiles.cuh) is one look-up, summed over a word (a byte where groups are finer) and
// multiplied by its group's scale. table[255] is the plain sum, which the offset multiplies.
//
// Grid: x = ranges of row tiles, y = ranges of k tiles, z = token. The k ranges' fp32 results go to `partial`
// [range][token][row] and bcqSumPartials adds them in order: repeatable bit for bit, where the paper uses atomicAdd.
#include "bcq_tiles.cuh"
#include "mma.cuh"

namespace {

constexpr int kLutWidth = 8;                                // mu
constexpr int kLutEntries = 1 << kLutWidth;
constexpr int kTablesPerTile = kTileColumns / kLutWidth;
constexpr int kTablesPerWord = kBitsPerWord / kLutWidth;
constexpr int kNibbleWidth = kLutWidth / 2;
constexpr int kNibbleEntries = 1 << kNibbleWidth;
constexpr int kThreads = kLutEntries;                       // thread = table entry while building

__device__ __forceinline__ uint32 wordOf(const uint4& words, int part) {
    return part == 0 ? words.x : part == 1 ? words.y : part == 2 ? words.z : words.w;
}

}  // namespace

template <int kBits,       // planes of the weight
          bool kFine,      // groups narrower than a word or not made of whole words: one scale per byte
          int kScaleBits>  // 16 or 8
__global__ void __launch_bounds__(kThreads, 3)
bcqLutGemv(const uint4* __restrict__ tiles,     // sign tiles
           const typename StoredScale<kScaleBits>::Type* __restrict__ scales,  // scale tiles
           const uint16* __restrict__ factors,  // factor tiles; null with fp16 scales
           const uint16* __restrict__ x,        // [tokens, columns], fp16 or bf16
           float* __restrict__ partial,         // [gridDim.y, tokens, rows]
           int rows, int columns,
           int groups, int groupSize,
           int entries,                        // kBits, or kBits + 1 with an offset
           int blockTiles,                     // k tiles per block
           int dtype) {
    extern __shared__ __align__(16) float tables[];  // [k tile][table][entry]
    constexpr int kWarps = kThreads / kWarpSize;
    constexpr int kParts = 4;                        // words per lane: rows g, g + 8 times words t, t + 4
    constexpr int kChunks = kFine ? kTablesPerWord : 1;
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const int quad = lane % kTileQuads, g = lane / kTileQuads;
    const int kTiles = (columns + kTileColumns - 1) / kTileColumns;
    const int firstTile = blockIdx.y * blockTiles, count = min(blockTiles, kTiles - firstTile);
    const uint16* row = x + size_t(blockIdx.z) * columns;
    allowNextKernel();
    waitForPriorKernels();

    // Sums of four activations with every sign, then every table entry from two of those.
    float* nibbles = tables + blockTiles * kTablesPerTile * kLutEntries;  // [table][half][16]
    for (int i = threadIdx.x; i < count * kTablesPerTile * 2 * kNibbleEntries; i += kThreads) {
        const int column = firstTile * kTileColumns + i / kNibbleEntries * kNibbleWidth;
        float sum = 0.0f;
#pragma unroll
        for (int bit = 0; bit < kNibbleWidth; ++bit) {
            const float value = column + bit < columns ? shortToFloat(row[column + bit], dtype) : 0.0f;
            sum += (i >> bit) & 1 ? value : -value;
        }
        nibbles[i] = sum;
    }
    __syncthreads();
    const int low = threadIdx.x % kNibbleEntries, high = kNibbleEntries + threadIdx.x / kNibbleEntries;
#pragma unroll 8
    for (int table = 0; table < count * kTablesPerTile; ++table) {
        const float* pair = nibbles + table * 2 * kNibbleEntries;
        tables[table * kLutEntries + threadIdx.x] = pair[low] + pair[high];
    }
    __syncthreads();

    const int allRowTiles = (rows + kTileRows - 1) / kTileRows;
    const int endRowTile = int(size_t(allRowTiles) * (blockIdx.x + 1) / gridDim.x);
    for (int rowTile = int(size_t(allRowTiles) * blockIdx.x / gridDim.x) + warp; rowTile < endRowTile;
         rowTile += kWarps) {
        float sums[2] = {0.0f, 0.0f};  // rows g and g + 8
        for (int tile = 0; tile < count; ++tile) {
            const int kTile = firstTile + tile;
            const uint4* source = tiles + (size_t(rowTile) * kTiles + kTile) * kBits * kWarpSize + lane;
            uint4 words[kBits];
#pragma unroll
            for (int i = 0; i < kBits; ++i) words[i] = __ldcs(source + i * kWarpSize);
#pragma unroll
            for (int part = 0; part < kParts; ++part) {
                const int word = quad + part / 2 * kTileQuads;
                const float* table = tables + (tile * kTablesPerTile + word * kTablesPerWord) * kLutEntries;
#pragma unroll
                for (int chunk = 0; chunk < kChunks; ++chunk) {
                    const int column = kTile * kTileColumns + word * kBitsPerWord + chunk * kLutWidth;
                    const int group = min(column / groupSize, groups - 1);
                    const auto* scale = scales + scaleIndex(rowTile, groups, group, g + part % 2 * 8, entries, 0);
                    constexpr int kBytes = kTablesPerWord / kChunks;
#pragma unroll
                    for (int i = 0; i < kBits; ++i) {
                        float found = 0.0f;
#pragma unroll
                        for (int b = 0; b < kBytes; ++b) {
                            const int byte = chunk * kBytes + b;
                            const uint32 key = wordOf(words[i], part) >> (byte * kLutWidth) & (kLutEntries - 1);
                            found += table[byte * kLutEntries + key];
                        }
                        sums[part % 2] += scaleValue<kScaleBits>(scale[i * kLaneRows]) * found;
                    }
                    if (entries > kBits) {
                        float plain = 0.0f;
#pragma unroll
                        for (int b = 0; b < kBytes; ++b) {
                            plain += table[(chunk * kBytes + b) * kLutEntries + kLutEntries - 1];
                        }
                        sums[part % 2] += offsetValue<kScaleBits>(scale[kBits * kLaneRows]) * plain;
                    }
                }
            }
        }
        float* target = partial + (size_t(blockIdx.y) * gridDim.z + blockIdx.z) * rows + rowTile * kTileRows;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float total = laneSum<1, kTileQuads>(sums[half]);
            const int local = g + half * 8;
            if (quad == 0 && rowTile * kTileRows + local < rows) {
                target[local] = total * rowFactor<kScaleBits>(factors, rowTile, local);
            }
        }
    }
}

// y[m][n] = bias[n] + sum of the ranges' partial results, in order.
__global__ void __launch_bounds__(kThreads)
bcqSumPartials(const float* __restrict__ partial,  // [ranges, tokens, rows]
               const uint16* __restrict__ bias,    // [rows] in y's type, or null
               uint16* __restrict__ y,             // [tokens, rows]
               int ranges, int tokens, int rows, int dtype) {
    const size_t index = size_t(blockIdx.x) * blockDim.x + threadIdx.x, size = size_t(tokens) * rows;
    allowNextKernel();
    waitForPriorKernels();
    if (index >= size) return;
    float sum = 0.0f;
    for (int range = 0; range < ranges; ++range) sum += partial[range * size + index];
    if (bias) sum += shortToFloat(bias[index % rows], dtype);
    y[index] = floatToShort(sum, dtype);
}
