// The order in which the fused products of a bcq weight of sign planes read x (gemm.cuh).
//
// A lane holds the signs of 32 neighbouring columns and makes pairs of weights of them, a pair per register. Which two
// columns make a pair hangs on what is cheap to get from sign planes (levels.cuh): those of word s = 0 .. 3, pair i = 0 .. 3.
//
//   arranged x   [token tile][panel][token of the tile] 8 chunks of 16 bytes, chunk c at place c ^ token % 8
//   panel        64 columns; two panels hold 128, which are four lanes' (t = 0 .. 3) words of 32 columns:
//                chunk 4 (s % 2) + i of panel s / 2 is, for t = 0 .. 3, pair i of word s: two elements of
//                columns 32 t + pairColumn(s, i) and pairDistance further
//
// That is the order of a warpgroup product's operand in shared memory (128-byte swizzle), so a panel of a token tile is
// copied as it is. Lanes of the order for batches hold other columns (level_codes.cuh), so that its chunks are neighbouring
// columns of x: 8 c .. of a panel.
#pragma once
#include "level_codes.cuh"

constexpr int kVectorBytes = sizeof(uint4), kShortBytes = sizeof(uint16);
constexpr int kPanelK = QK_PANEL_K, kTilePanels = kTileK / kPanelK, kPanelRowBytes = kPanelK * kShortBytes;
constexpr int kPanelChunks = kPanelRowBytes / kVectorBytes;
static_assert(kPanelRowBytes == 128, "a row of the swizzle");

// The first column of pair i of word s, and how far the second one is from it.
__device__ __forceinline__ int pairColumn(int bits, int s, int i) {
    if (bits == 1) return 4 * s + i;
    if (bits == 2) return s % 2 * 4 + i / 2 * 2 + s / 2 + i % 2 * 16;
    return 8 * i + s;
}
__device__ __forceinline__ int pairDistance(int bits) { return bits == 1 ? 16 : bits == 2 ? 8 : 4; }
