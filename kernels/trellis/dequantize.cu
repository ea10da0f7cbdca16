// weight[n][k] = scales[n] * sum_(i, d) filter[i][d] * (2 signs[i][ring(n - d)][k] - 1), rounded to the weight's type.
//
// Reads the sign tiles of q N rows of one plane (../bcq/tiles.cuh), which have whole tiles for every plane, as N is a
// multiple of 16; writes row-major [N, K] for cuBLAS.
//
//   a block     a ring of 64 rows by one k tile of 256 columns; a thread two neighbouring columns, down the ring
//   shared      the words of the ring, row by row, and two tables: what the low and the high 8 bits of a window stand for
//
// The window of a row is that of the row before, q bits on. Grid: (k tiles, rings).
#include "../bcq/tiles.cuh"

namespace {

constexpr int kRing = QK_BLOCK_ROWS;
constexpr int kRingTiles = kRing / kTileN;
constexpr int kThreads = kTileK / 2;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kTableBits = 8;
constexpr int kTable = 1 << kTableBits;

// What bits first .. first + 7 of a window give of the weight.
template <int kBits>
__device__ __forceinline__ float tableEntry(uint32 bits, int first, const float* __restrict__ filter, int taps) {
    float sum = 0.f;
    for (int j = first; j < min(first + kTableBits, kBits * taps); ++j) {
        const float one = filter[j % kBits * taps + j / kBits];
        sum += bits >> (j - first) & 1 ? one : -one;
    }
    return sum;
}

}  // namespace

template <int kBits>  // planes
__global__ void __launch_bounds__(kThreads, 8)
trellisDequantize(const uint4* __restrict__ tiles,    // sign tiles
                  const float* __restrict__ filter,   // [kBits, taps]
                  const uint16* __restrict__ scales,  // [N] fp16
                  void* __restrict__ weight,          // [N, K] of dtype
                  int N, int K, int taps, int dtype) {
    __shared__ uint32 words[kBits][kRing][kWordsPerTileRow];
    __shared__ float low[kTable], high[kTable], scale[kRing];
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int kTile = blockIdx.x, kTiles = gridDim.x, firstRow = blockIdx.y * kRing, ring = min(kRing, N - firstRow);
    for (int i = threadIdx.x; i < kTable; i += kThreads) {
        low[i] = tableEntry<kBits>(i, 0, filter, taps), high[i] = tableEntry<kBits>(i, kTableBits, filter, taps);
    }
    for (int row = threadIdx.x; row < ring; row += kThreads) scale[row] = halfToFloat(scales[firstRow + row]);
    for (int part = warp; part < kBits * kRingTiles; part += kWarps) {  // whole warps
        const int plane = part / kRingTiles, tileOfRing = part % kRingTiles;
        if (tileOfRing * kTileN >= ring) continue;
        const size_t nTile = (size_t(plane) * N + firstRow) / kTileN + tileOfRing;
        const uint4 own = __ldcs(tiles + (nTile * kTiles + kTile) * kWarpSize + lane);
        const uint32 parts[4] = {own.x, own.y, own.z, own.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const int row = tileOfRing * kTileN + lane / kTileQuads + j % 2 * (kTileN / 2);
            words[plane][row][lane % kTileQuads + j / 2 * kTileQuads] = parts[j];
        }
    }
    __syncthreads();
    const int column = 2 * threadIdx.x, word = column / kBitsPerWord, bit = column % kBitsPerWord;
    const int k = kTile * kTileK + column;
    if (k >= K) return;
    const uint32 mask = (1u << (kBits * taps)) - 1;
    const bool pairs = K % 2 == 0;
    uint32 window[2] = {};
    for (int row = 1 - taps; row < ring; ++row) {
        const int at = row < 0 ? row + ring : row;
        uint32 bits[2] = {};
#pragma unroll
        for (int i = 0; i < kBits; ++i) {
            const uint32 both = words[i][at][word] >> bit;
            bits[0] |= (both & 1) << i, bits[1] |= (both >> 1 & 1) << i;
        }
        float value[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            window[j] = (window[j] << kBits | bits[j]) & mask;
            value[j] = (low[window[j] % kTable] + high[window[j] >> kTableBits]) * scale[at];
        }
        if (row < 0) continue;
        const size_t place = size_t(firstRow + row) * K + k;
        if (pairs && dtype != kFloat32) {
            const uint32 first = floatToShort(value[0], dtype), second = floatToShort(value[1], dtype);
            *reinterpret_cast<uint32*>(static_cast<uint16*>(weight) + place) = first | second << 16;
        } else {
            storeElement(weight, place, value[0], dtype);
            if (k + 1 < K) storeElement(weight, place + 1, value[1], dtype);
        }
    }
}
