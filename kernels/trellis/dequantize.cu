// weight[n][k] = scales[n] * sum_(i, d) filter[i][d] * (2 signs[i][ring(n - d)][k] - 1), rounded to the weight's type.
//
// Reads the sign tiles of q N rows of one plane (../bcq/tiles.cuh), which have whole tiles for every plane, as N is a
// multiple of 16; writes row-major [N, K] for cuBLAS.
//
//   a block     a ring of 64 rows by two k tiles of 256 columns
//   a warp      64 of these columns, two a lane; it turns words of columns into words of rows, so that a lane has its
//               columns' signs in registers, and windows of them are shifts
//   shared      the words of the ring, row by row, and for every plane a table of what a window of its signs stands
//               for, a copy for each lane: lanes look up different windows, and 32 copies lie in 32 banks
//
// Grid: (pairs of k tiles, rings). Dynamic shared memory: kBits << taps entries of 32 floats.
#include "../bcq/tiles.cuh"

namespace {

constexpr int kRing = QK_BLOCK_ROWS;
constexpr int kRingTiles = kRing / kTileN;
constexpr int kBlockTiles = QK_BLOCK_TILES;
constexpr int kBlockWords = kBlockTiles * kWordsPerTileRow;  // of a row
constexpr int kRowWords = kBlockWords + 1;                   // odd: lanes that are rows read their words from all banks
constexpr int kLaneWords = 2;                                // of a row, whose columns a warp has
constexpr int kWarps = kBlockWords / kLaneWords;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kHalves = kRing / kBitsPerWord;
constexpr int kMostEntries = 1 << (QK_MOST_TAPS + 1);  // kBits << taps, where kBits * taps <= 16
constexpr int kEntryBits = 7;                          // of the bytes of an entry's copies
static_assert(1 << kEntryBits == kWarpSize * sizeof(float) && kHalves == 2, "what the shifts below take for granted");

// Bit r of lane c becomes bit c of lane r.
__device__ __forceinline__ uint32 transposed(uint32 word, int lane) {
    uint32 low = 0x0000ffffu;
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2, low ^= low << distance) {
        const uint32 other = __shfl_xor_sync(kFullWarp, word, distance);
        word = lane & distance ? (word & ~low) | (other >> distance & low) : (word & low) | (other << distance & ~low);
    }
    return word;
}

// Of the windows that end in rows 0 .. 31 of a word, the bits: those of row r at r .. r + taps - 1, the oldest lowest.
__device__ __forceinline__ uint64 windowsOf(uint32 before, uint32 word, int taps) {
    return (uint64(word) << kBitsPerWord | before) >> (kBitsPerWord + 1 - taps);
}

// The last rows of a ring, up to the highest bit: what comes before its first row.
__device__ __forceinline__ uint32 beforeRing(const uint32 (&words)[kHalves], int ring) {
    if (ring < kBitsPerWord) return words[0] << (kBitsPerWord - ring);
    return uint32((uint64(words[1]) << kBitsPerWord | words[0]) >> (ring - kBitsPerWord));
}

// Store to `to` where `inside`, without a branch, in which the compiler would hide all that makes the value.
template <int kDtype>
__device__ __forceinline__ void storeIf(bool inside, char* to, float value) {
    if constexpr (kDtype == kFloat32) {
        asm volatile("{.reg .pred p; setp.ne.s32 p, %2, 0; @p st.global.f32 [%0], %1;}"
                     :: "l"(to), "f"(value), "r"(int(inside)) : "memory");
    } else {
        asm volatile("{.reg .pred p; setp.ne.s32 p, %2, 0; @p st.global.b16 [%0], %1;}"
                     :: "l"(to), "h"(floatToShort(value, kDtype)), "r"(int(inside)) : "memory");
    }
}

}  // namespace

template <int kDtype, int kBits>  // of the weight; planes
__global__ void __launch_bounds__(kThreads, kBits <= 4 ? 3 : 2)
trellisDequantize(const uint4* __restrict__ tiles,    // sign tiles
                  const float* __restrict__ filter,   // [kBits, taps]
                  const uint16* __restrict__ scales,  // [N] fp16
                  void* __restrict__ weight,          // [N, K] of kDtype
                  int N, int K, int taps) {
    extern __shared__ float4 shared[];
    __shared__ uint32 words[kBits][kRing][kRowWords];
    __shared__ float entries[kMostEntries], scale[kRing];
    float* tables = reinterpret_cast<float*>(shared);  // [kBits << taps][kWarpSize]
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int kTiles = (K + kTileK - 1) / kTileK, firstTile = blockIdx.x * kBlockTiles;
    const int firstRow = blockIdx.y * kRing, ring = min(kRing, N - firstRow);
    for (int entry = threadIdx.x; entry < kBits << taps; entry += kThreads) {
        float sum = 0.f;
        for (int d = 0; d < taps; ++d) {  // the newest row is the highest bit
            const float one = filter[(entry >> taps) * taps + d];
            sum += entry >> (taps - 1 - d) & 1 ? one : -one;
        }
        entries[entry] = sum;
    }
    for (int row = threadIdx.x; row < ring; row += kThreads) scale[row] = halfToFloat(scales[firstRow + row]);
    for (int part = warp; part < kBits * kRingTiles * kBlockTiles; part += kWarps) {  // whole warps
        const int tile = part % kBlockTiles, tileOfRing = part / kBlockTiles % kRingTiles;
        const int plane = part / (kBlockTiles * kRingTiles);
        if (tileOfRing * kTileN >= ring || firstTile + tile >= kTiles) continue;
        const size_t nTile = (size_t(plane) * N + firstRow) / kTileN + tileOfRing;
        const uint4 own = __ldcs(tiles + (nTile * kTiles + firstTile + tile) * kWarpSize + lane);
        const uint32 parts[4] = {own.x, own.y, own.z, own.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int row = tileOfRing * kTileN + lane / kTileQuads + j % 2 * (kTileN / 2);
            words[plane][row][tile * kWordsPerTileRow + lane % kTileQuads + j / 2 * kTileQuads] = parts[j];
        }
    }
    __syncthreads();
    for (int entry = warp; entry < kBits << taps; entry += kWarps) tables[entry * kWarpSize + lane] = entries[entry];
    uint32 signs[kBits][kLaneWords][kHalves];  // bit r: row r of the half, of the lane's column of the word
#pragma unroll
    for (int i = 0; i < kBits; ++i) {
#pragma unroll
        for (int j = 0; j < kLaneWords; ++j) {
#pragma unroll
            for (int half = 0; half < kHalves; ++half) {
                const int row = half * kBitsPerWord + lane;
                signs[i][j][half] = transposed(row < ring ? words[i][row][warp * kLaneWords + j] : 0, lane);
            }
        }
    }
    __syncthreads();
    const int k = firstTile * kTileK + warp * kLaneWords * kBitsPerWord + lane;
    const uint32 mask = ((1u << taps) - 1) << kEntryBits;
    const char* table = reinterpret_cast<const char*>(tables);
    uint32 own[kBits];  // the lane's copy of the first entry of a plane
#pragma unroll
    for (int i = 0; i < kBits; ++i) own[i] = lane * uint32(sizeof(float)) | uint32(i) << (taps + kEntryBits);
    bool inside[kLaneWords];
#pragma unroll
    for (int j = 0; j < kLaneWords; ++j) inside[j] = k + j * kBitsPerWord < K;
    constexpr int kElement = kDtype == kFloat32 ? 4 : 2;
    char* to = static_cast<char*>(weight) + (size_t(firstRow) * K + k) * kElement;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
        uint64 windows[kBits][kLaneWords];
#pragma unroll
        for (int i = 0; i < kBits; ++i) {
#pragma unroll
            for (int j = 0; j < kLaneWords; ++j) {
                const uint32 before = half ? signs[i][j][0] : beforeRing(signs[i][j], ring);
                windows[i][j] = windowsOf(before, signs[i][j][half], taps);
            }
        }
        for (int rows = half * kBitsPerWord; rows < min(ring, (half + 1) * kBitsPerWord); rows += kTileN) {
            uint32 now[kBits][kLaneWords];
#pragma unroll
            for (int i = 0; i < kBits; ++i) {
#pragma unroll
                for (int j = 0; j < kLaneWords; ++j) now[i][j] = uint32(windows[i][j]), windows[i][j] >>= kTileN;
            }
#pragma unroll
            for (int r = 0; r < kTileN; ++r, to += size_t(K) * kElement) {
                const float unit = scale[rows + r];
#pragma unroll
                for (int j = 0; j < kLaneWords; ++j) {
                    float sum;
#pragma unroll
                    for (int i = 0; i < kBits; ++i) {
                        const uint32 bits = now[i][j];
                        const uint32 window = r < kEntryBits ? bits << (kEntryBits - r) : bits >> (r - kEntryBits);
                        const float part = *reinterpret_cast<const float*>(table + ((window & mask) | own[i]));
                        sum = i == 0 ? part : sum + part;
                    }
                    storeIf<kDtype>(inside[j], to + j * kBitsPerWord * kElement, sum * unit);
                }
            }
        }
    }
}
