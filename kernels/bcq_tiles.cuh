// The prepared order of a bcq weight [N, K], read by all bcq kernels; written by quantkit/ops/bcq_tiles.py.
//
//   sign tiles   [row tile][k tile][plane][lane] uint4     16 rows x 256 columns of one plane = 512 bytes
//     lane = 4 g + t holds  x: row g,     columns 32 t .. 32 t + 31      (bit b = column 32 t + b)
//                           y: row g,     columns 128 + 32 t ..
//                           z: row g + 8, columns 32 t ..
//                           w: row g + 8, columns 128 + 32 t ..
//   scale tiles  [row tile][group][g][entry][2] fp16       rows g and g + 8 of the tile
//     entry i < bits: scales of plane i; entry bits, where present: the offset
//
// That is the fragment order of mma.m16n8k128/k256 with the weights as A, so one coalesced 512-byte load feeds the
// tensor cores and no bit moves. Columns behind K and rows behind N are zero bits and zero scales.
#pragma once
#include "common.cuh"

constexpr int kTileRows = 16;
constexpr int kTileColumns = 256;
constexpr int kTileQuads = 4;        // values of t
constexpr int kLaneRows = 2;         // rows g and g + 8 of a lane
constexpr int kWordsPerTileRow = kTileColumns / kBitsPerWord;

// Index of the scale of (row tile, group, row of the tile, entry).
__device__ __forceinline__ size_t scaleIndex(int rowTile, int groups, int group, int row, int entries, int entry) {
    const size_t block = size_t(rowTile) * groups + group;
    return ((block * (kTileRows / kLaneRows) + row % 8) * entries + entry) * kLaneRows + row / 8;
}
