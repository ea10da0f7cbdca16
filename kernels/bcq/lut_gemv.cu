// y[m][n] = bias[n] + sum_g sum_k x[m][k] * (sum_i scale_i (2 sign_i - 1) + offset)      (nuQmm sections 3.2, 3.3)
// through look-up tables of mu = 8 activations, for any group_size that is a multiple of 8.
//
// A table holds, for one byte of sign bits (a key), the sum of eight activations with those signs: 256 fp32 values.
// table[255] is the plain sum, which the offset multiplies. A block builds the tables of two k tiles,
//   tables [key][k tile][sub-vector] float       one key = 2 * 32 * 4 = 256 bytes
// then its warps walk the block's n tiles. The bank of a table is the number of its sub-vector, so 32 lanes that look
// into 32 different tables never wait for each other, whatever their keys. In the prepared order (tiles.cuh) lane
// 4 g + t holds eight sub-vectors of two rows, 16 (j / 4) + 4 t + j % 4 for j < 8; the eight lanes of a t hold the same
// ones, so in step s lane 4 g + t takes j = s ^ g.
// An address is two bytes: the key above 4 * sub-vector; the k tile is a constant in the load.
//
// Grid: x = ranges of n tiles, y = pairs of k tiles, z = token. The pairs' fp32 results go to `partial`
// [pair][m][n] and bcqSumPartials adds them in order: repeatable bit for bit, where the paper uses atomicAdd.
#include "tiles.cuh"
#include "../shared/epilogue.cuh"
#include "../shared/mma.cuh"

namespace {

constexpr int kLutWidth = 8;                                      // mu
constexpr int kTablesPerTile = kTileK / kLutWidth;
constexpr int kBlockTiles = QK_LUT_BLOCK_TILES;                   // k tiles of a block
constexpr int kEntryFloats = kBlockTiles * kTablesPerTile;
constexpr int kSteps = kTablesPerTile / kTileQuads;               // look-ups per lane, row, plane and k tile
constexpr int kWordSteps = kBitsPerWord / kLutWidth;
constexpr int kThreads = QK_LUT_THREADS;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kWarpsPerTile = kWarps / kBlockTiles;               // that build one k tile's tables
constexpr int kNibbleWidth = kLutWidth / 2;
constexpr int kNibbleEntries = 1 << kNibbleWidth;
constexpr int kNibblesPerWarp = kNibbleEntries / kWarpsPerTile;   // high nibbles: 64 of a table's entries
constexpr int kRoomyBits = QK_LUT_ROOMY_BITS;                     // up to here the registers carry three blocks
constexpr int kPairBits = 5;                                      // up to here a lane holds the words of both k tiles
constexpr int kSumBatch = 16;                                     // loads in flight per thread
constexpr uint32 kByteOrder = 0x3210, kEveryByte = 0x1111;        // selectors, see selectBytes
constexpr uint32 kAddressBytes = 0xcc04;                          // of keys and places: place, key, place's top bit: 0
static_assert(kTablesPerTile == kWarpSize, "a lane builds one table; a warp looks into all of them");
static_assert(kEntryFloats * sizeof(float) == 1 << kBitsPerByte, "the key is byte 1 of an address");
static_assert(kNibblesPerWarp == 4, "a warp's number gives the signs of the last two values");

template <int kScaleBits> struct StoredPair { using Type = uint32; };  // of rows g and g + 8
template <> struct StoredPair<8> { using Type = uint16; };

// Eight activations; zeros behind K.
__device__ __forceinline__ void loadActivations(const uint16* row, int first, int K, int dtype, bool vectors,
                                                float (&values)[kLutWidth]) {
    if (vectors) {  // K is a multiple of 8 and x is 16-byte aligned
        uint4 raw = make_uint4(0, 0, 0, 0);
        if (first < K) raw = *reinterpret_cast<const uint4*>(row + first);
        const uint32 pairs[kLutWidth / 2] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
        for (int i = 0; i < kLutWidth; ++i) values[i] = shortToFloat(uint16(pairs[i / 2] >> i % 2 * 16), dtype);
    } else {
#pragma unroll
        for (int i = 0; i < kLutWidth; ++i) {
            values[i] = first + i < K ? shortToFloat(row[first + i], dtype) : 0.0f;
        }
    }
}

// The entries of one table whose keys begin with the two bits `part`; table[key * kEntryFloats] is written.
__device__ __forceinline__ void buildEntries(const float (&values)[kLutWidth], int part, float* table) {
    float low[kNibbleEntries / 2];  // sums of the first four, the last one positive; the others are their negatives
#pragma unroll
    for (int n = 0; n < kNibbleEntries / 2; ++n) {
        low[n] = values[3] + (n & 4 ? values[2] : -values[2]);
        low[n] += n & 2 ? values[1] : -values[1];
        low[n] += n & 1 ? values[0] : -values[0];
    }
    const float top = (part & 2 ? values[7] : -values[7]) + (part & 1 ? values[6] : -values[6]);
    float* target = table + part * kNibblesPerWarp * kNibbleEntries * kEntryFloats;
#pragma unroll
    for (int nibble = 0; nibble < kNibblesPerWarp; ++nibble) {
        const float high = top + (nibble & 2 ? values[5] : -values[5]) + (nibble & 1 ? values[4] : -values[4]);
#pragma unroll
        for (int n = 0; n < kNibbleEntries; ++n) {
            const int mirrored = kNibbleEntries - 1 - n;
            const float sum = n < mirrored ? high - low[mirrored % (kNibbleEntries / 2)]
                                           : high + low[n % (kNibbleEntries / 2)];
            target[(nibble * kNibbleEntries + n) * kEntryFloats] = sum;
        }
    }
}

// What a lane holds of one k tile of one n tile. kFine: no scales, Lane::add reads them.
template <int kBits, int kScaleBits>
struct Share {
    uint4 words[kBits];
    typename StoredPair<kScaleBits>::Type scales[2][kBits + 1];  // of both words' groups; the last: offset
};

// What a lane keeps from n tile to n tile.
template <int kBits, bool kFine, int kScaleBits>
struct Lane {
    static constexpr int kSpanSteps = kFine ? 1 : kWordSteps;  // steps that share a scale
    static constexpr int kSpans = kSteps / kSpanSteps;
    using Stored = typename StoredScale<kScaleBits>::Type;
    using Pair = typename StoredPair<kScaleBits>::Type;
    int t, g;
    uint32 first, second;                 // selectors of the keys of steps 0 .. 3, 4 .. 7 from words t, t + 4
    uint32 places[2];                     // 4 * sub-vector of steps 0 .. 3, 4 .. 7, a byte each
    uint32 offsets[kBlockTiles][kSpans];  // of a span's scales in their n tile, bytes
    float plains[kBlockTiles][kSpans];    // plain sums; kFine looks them up again
    const float* tables;

    __device__ __forceinline__ Lane(int lane, const float* tables)
        : t(lane % kTileQuads), g(lane / kTileQuads), tables(tables) {
        first = kByteOrder ^ g * kEveryByte;
        second = first ^ kWordSteps * kEveryByte;
        places[0] = places[1] = 0;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            places[step / kWordSteps] |= subVector(step) * sizeof(float) << step % kWordSteps * kBitsPerByte;
        }
        keepInRegister(first);
        keepInRegister(second);
        keepInRegister(places[0]);
        keepInRegister(places[1]);
    }

    __device__ __forceinline__ int subVector(int step) const {
        const int j = step ^ g;
        return (j / kWordSteps * kTileQuads + t) * kWordSteps + j % kWordSteps;
    }

    __device__ __forceinline__ void setOffsets(int firstTile, int groups, int groupSize, int entries) {
#pragma unroll
        for (int tile = 0; tile < kBlockTiles; ++tile) {
#pragma unroll
            for (int span = 0; span < kSpans; ++span) {
                const int k = (firstTile + tile) * kTileK + subVector(span * kSpanSteps) * kLutWidth;
                const int group = min(k / groupSize, groups - 1);
                offsets[tile][span] = uint32(scaleIndex(0, groups, group, g, entries, 0) * sizeof(Stored));
                keepInRegister(offsets[tile][span]);
            }
        }
    }

    __device__ __forceinline__ const Pair* scalesOf(const Pair* nTile, int tile, int span) const {
        return reinterpret_cast<const Pair*>(reinterpret_cast<const char*>(nTile) + offsets[tile][span]);
    }

    // words, scales: of the n tile.
    __device__ __forceinline__ void load(Share<kBits, kScaleBits>& share, int tile, bool offset, const uint4* words,
                                         const Pair* scales) const {
#pragma unroll
        for (int i = 0; i < kBits; ++i) share.words[i] = __ldcs(words + (tile * kBits + i) * kWarpSize);
        if constexpr (!kFine) {
#pragma unroll
            for (int span = 0; span < kSpans; ++span) {
                const Pair* source = scalesOf(scales, tile, span);
#pragma unroll
                for (int i = 0; i < kBits; ++i) share.scales[span][i] = source[i];
                if (offset) share.scales[span][kBits] = source[kBits];
            }
        }
    }

    // The sum of a span's entries for the keys of a word.
    __device__ __forceinline__ float lookUp(int tile, int span, uint32 keys) const {
        const char* tileTables = reinterpret_cast<const char*>(tables + tile * kTablesPerTile);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < kSpanSteps; ++i) {
            const int step = span * kSpanSteps + i;
            const uint32 selector = kAddressBytes + step % kWordSteps * kEveryByte;
            const uint32 address = selectBytes(keys, places[step / kWordSteps], selector);
            const float entry = *reinterpret_cast<const float*>(tileTables + address);
            sum = i == 0 ? entry : sum + entry;
        }
        return sum;
    }

    __device__ __forceinline__ void setPlains() {
#pragma unroll
        for (int tile = 0; tile < kBlockTiles; ++tile) {
#pragma unroll
            for (int span = 0; span < kSpans; ++span) plains[tile][span] = lookUp(tile, span, ~0u);
        }
    }

    // Add one k tile's share to the sums of rows g and g + 8. scales: of the n tile; read where groups are fine.
    __device__ __forceinline__ void add(float (&sums)[kLaneRows], const Share<kBits, kScaleBits>& share, int tile,
                                        bool offset, const Pair* scales) const {
        uint32 keys[kBits][2][kLaneRows];
#pragma unroll
        for (int i = 0; i < kBits; ++i) {
            const uint4 words = share.words[i];
            keys[i][0][0] = selectBytes(words.x, words.z, first), keys[i][1][0] = selectBytes(words.x, words.z, second);
            keys[i][0][1] = selectBytes(words.y, words.w, first), keys[i][1][1] = selectBytes(words.y, words.w, second);
        }
#pragma unroll
        for (int span = 0; span < kSpans; ++span) {
            const Pair* stored = kFine ? scalesOf(scales, tile, span) : share.scales[span % 2];
#pragma unroll
            for (int i = 0; i < kBits; ++i) {
                const Pair pair = stored[i];
#pragma unroll
                for (int half = 0; half < kLaneRows; ++half) {
                    sums[half] += scaleValue<kScaleBits>(Stored(pair >> half * kScaleBits)) *
                                  lookUp(tile, span, keys[i][span * kSpanSteps / kWordSteps][half]);
                }
            }
            if (offset) {
                const Pair pair = stored[kBits];
                const float plain = kFine ? lookUp(tile, span, ~0u) : plains[tile][span];
#pragma unroll
                for (int half = 0; half < kLaneRows; ++half) {
                    sums[half] += offsetValue<kScaleBits>(Stored(pair >> half * kScaleBits)) * plain;
                }
            }
        }
    }

    // The lanes of a row together, to target[row].
    __device__ __forceinline__ void store(const float (&sums)[kLaneRows], float* target, int N, int nTile,
                                          const uint16* factors) const {
#pragma unroll
        for (int half = 0; half < kLaneRows; ++half) {
            const float total = laneSum<1, kTileQuads>(sums[half]);
            const int local = g + half * 8, n = nTile * kTileN + local;
            if (t == 0 && n < N) target[n] = total * rowFactor<kScaleBits>(factors, nTile, local);
        }
    }
};

}  // namespace

template <int kBits,       // planes of the weight
          bool kFine,      // groups narrower than a word or not made of whole words: one scale per byte
          int kScaleBits>  // 16 or 8
__global__ void __launch_bounds__(kThreads, kFine || kBits > kRoomyBits ? 2 : 3)
bcqLutGemv(const uint4* __restrict__ tiles,     // sign tiles
           const typename StoredPair<kScaleBits>::Type* __restrict__ scales,  // scale tiles
           const uint16* __restrict__ factors,  // factor tiles; null with fp16 scales
           const uint16* x,                     // [M, K], fp16 or bf16; written until the wait, so not __restrict__
           float* __restrict__ partial,         // [gridDim.y, M, N]
           int N, int K,
           int groups, int groupSize,
           int entries,                         // kBits, or kBits + 1 with an offset
           int dtype,
           int vectors) {                       // whether x can be read 16 bytes at a time
    extern __shared__ __align__(16) float tables[];
    constexpr int kShares = kBits <= kPairBits ? kBlockTiles : 1;  // k tiles that a lane holds
    const int laneIndex = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const int kTiles = (K + kTileK - 1) / kTileK, nTiles = (N + kTileN - 1) / kTileN;
    const int firstTile = blockIdx.y * kBlockTiles;
    const bool pair = firstTile + 1 < kTiles, offset = entries > kBits;
    const int endNTile = int(size_t(nTiles) * (blockIdx.x + 1) / gridDim.x);
    int nTile = int(size_t(nTiles) * blockIdx.x / gridDim.x) + warp;
    allowNextKernel();

    // The first words and scales are on their way while the kernels before this one end and the tables are built.
    Lane<kBits, kFine, kScaleBits> lane(laneIndex, tables);
    lane.setOffsets(firstTile, groups, groupSize, entries);
    const size_t wordStride = size_t(kTiles) * kBits * kWarpSize;  // of n tiles
    const size_t scaleStride = scaleIndex(1, groups, 0, 0, entries, 0) / kLaneRows;
    const uint4* words = tiles + nTile * wordStride + firstTile * kBits * kWarpSize + laneIndex;
    scales += nTile * scaleStride;
    Share<kBits, kScaleBits> shares[kShares];
    if (nTile < endNTile) {
        lane.load(shares[0], 0, offset, words, scales);
        if (kShares == kBlockTiles && pair) lane.load(shares[kShares - 1], 1, offset, words, scales);
    }
    waitForPriorKernels();

    const int builtTile = warp / kWarpsPerTile;
    const int k = (firstTile + builtTile) * kTileK + laneIndex * kLutWidth;
    float values[kLutWidth];
    loadActivations(x + size_t(blockIdx.z) * K, k, K, dtype, vectors, values);
    buildEntries(values, warp % kWarpsPerTile, tables + builtTile * kTablesPerTile + laneIndex);
    __syncthreads();
    if (!kFine && offset) lane.setPlains();

    for (; nTile < endNTile; nTile += kWarps) {
        const bool more = nTile + kWarps < endNTile;
        const uint4* nextWords = words + kWarps * wordStride;
        const auto* nextScales = scales + kWarps * scaleStride;
        float sums[kLaneRows] = {0.0f, 0.0f};
        lane.add(sums, shares[0], 0, offset, scales);
        if (kShares == kBlockTiles && more) lane.load(shares[0], 0, offset, nextWords, nextScales);
        if (pair) {
            if (kShares < kBlockTiles) lane.load(shares[0], 1, offset, words, scales);
            lane.add(sums, shares[kShares - 1], 1, offset, scales);
            if (kShares == kBlockTiles && more) lane.load(shares[kShares - 1], 1, offset, nextWords, nextScales);
        }
        if (kShares < kBlockTiles && more) lane.load(shares[0], 0, offset, nextWords, nextScales);
        words = nextWords, scales = nextScales;

        lane.store(sums, partial + (size_t(blockIdx.y) * gridDim.z + blockIdx.z) * N, N, nTile, factors);
    }
}

// y[m][n] = residual[m][n] + activation(bias[n] + sum of the pairs' partial results, in order).
__global__ void __launch_bounds__(kThreads)
bcqSumPartials(const float* partial,              // [pairs, M, N]; written until the wait, so not __restrict__
               const uint16* __restrict__ bias,    // [N] in y's type, or null
               const uint16* residual,             // [M, N], or null
               uint16* __restrict__ y,             // [M, N]
               int pairs, int M, int N, int activation, int dtype) {
    const size_t index = size_t(blockIdx.x) * blockDim.x + threadIdx.x, size = size_t(M) * N;
    allowNextKernel();
    waitForPriorKernels();
    if (index >= size) return;
    float sum = 0.0f;
    for (int first = 0; first < pairs; first += kSumBatch) {
        float values[kSumBatch];
#pragma unroll
        for (int i = 0; i < kSumBatch; ++i) {
            values[i] = first + i < pairs ? partial[(first + i) * size + index] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < kSumBatch; ++i) sum += values[i];
    }
    if (bias) sum += shortToFloat(bias[index % N], dtype);
    y[index] = withEpilogue(sum, activation, residual, residual ? shortToFloat(residual[index], dtype) : 0.0f, dtype);
}
