// How rows of x come into the order of arrange.cuh: through shared memory, so that whole vectors are read and written.
#pragma once
#include "arrange.cuh"
#include "../shared/mma.cuh"

constexpr int kBlockTokens = QK_ARRANGE_TOKENS, kBlockK = 2 * kPanelK, kArrangeThreads = QK_ARRANGE_THREADS;
constexpr int kRowVectors = kBlockK * kShortBytes / kVectorBytes, kChunkValues = kVectorBytes / kShortBytes;
constexpr int kPaddedRow = kBlockK + 2;  // rows begin in different banks
static_assert(kBlockTokens * kRowVectors == kArrangeThreads, "a vector a thread");

// A chunk of one of two panels. columns: those of both, of one token, in shared memory.
__device__ __forceinline__ uint4 arrangedChunk(const uint16* columns, int bits, int panel, int chunk) {
    const int column = pairColumn(bits, panel * 2 + chunk / 4, chunk % 4), distance = pairDistance(bits);
    uint32 pairs[kTileQuads];
#pragma unroll
    for (int t = 0; t < kTileQuads; ++t) {
        const uint16* own = columns + t * kBitsPerWord + column;
        pairs[t] = own[0] | uint32(own[distance]) << 16;
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Its place among all: of token m, of a panel of the row.
__device__ __forceinline__ size_t arrangedPlace(int m, int panel, int chunk, int tileTokens, int panels) {
    const int place = m % tileTokens;
    return ((size_t(m / tileTokens) * panels + panel) * tileTokens + place) * kPanelChunks + (chunk ^ place % kPanelChunks);
}
__device__ __forceinline__ int rowPanels(int K) { return (K + kTileK - 1) / kTileK * kTilePanels; }

// Of kBlockTokens tokens.
using Rows = uint16[kBlockTokens][kPaddedRow];

// The vector of a row that a thread puts in order: of the block's rows, of its row, of all rows, its first column. Grid: x =
// kBlockK columns, two panels; y = kBlockTokens tokens.
struct ThreadVector {
    int row, vector, m, k;
    __device__ __forceinline__ ThreadVector()
        : row(threadIdx.x / kRowVectors), vector(threadIdx.x % kRowVectors), m(blockIdx.y * kBlockTokens + row),
          k(blockIdx.x * kBlockK + vector * kChunkValues) {}
};

// value: the thread's vector, zeros behind column K. Tokens that are not `present` are not written.
__device__ __forceinline__ void arrangeVector(Rows& rows, const ThreadVector& own, const uint4& value, uint4* arranged,
                                              bool present, int K, int tileTokens, int bits) {
    const uint32 pairs[kChunkValues / 2] = {value.x, value.y, value.z, value.w};
#pragma unroll
    for (int i = 0; i < kChunkValues / 2; ++i) {
        *reinterpret_cast<uint32*>(&rows[own.row][own.vector * kChunkValues + 2 * i]) = pairs[i];
    }
    __syncthreads();
    if (!present) return;
    const int panel = own.vector / kPanelChunks, chunk = own.vector % kPanelChunks;
    const size_t place = arrangedPlace(own.m, blockIdx.x * 2 + panel, chunk, tileTokens, rowPanels(K));
    arranged[place] = arrangedChunk(rows[own.row], bits, panel, chunk);
}
