// The prepared order of a bcq weight [N, K], read by all bcq kernels; written by quantkit/ops/bcq/layout.py.
//
//   sign tiles   [n tile][k tile][plane][lane] uint4     16 rows x 256 columns of one plane = 512 bytes
//     lane = 4 g + t holds  x: row g,     columns 32 t .. 32 t + 31      (bit b = column 32 t + b)
//                           y: row g + 8, columns 32 t ..
//                           z: row g,     columns 128 + 32 t ..
//                           w: row g + 8, columns 128 + 32 t ..
//   scale tiles  [n tile][group][g][entry][2]            rows g and g + 8 of the tile
//     entry i < bits: scales of plane i; entry bits, where present: the offset
//     fp16; or, with 8-bit scales, codes that count in the factor of their row: uint8 of a scale, int8 of an offset
//   factor tiles [n tile][g][2] fp16                     with 8-bit scales
//
// In the order for batches the words of a lane hold other columns of each half (level_codes.cuh).
//
// That is the fragment order of mma.m16n8k128/k256 with the weights as A, so one coalesced 512-byte load feeds the
// tensor cores and no bit moves. Columns behind K and rows behind N are zero bits and zero scales.
#pragma once
#include "../shared/common.cuh"

constexpr int kTileN = QK_TILE_N;
constexpr int kTileK = QK_TILE_K;
constexpr int kTileQuads = 4;        // values of t
constexpr int kLaneRows = 2;         // rows g and g + 8 of a lane
static_assert(kTileN == 16 && kTileK == 256, "what the tensor cores take and this file draws");
constexpr int kWordsPerTileRow = kTileK / kBitsPerWord;

using int8 = signed char;

constexpr int kAnyScaleBits = 0;  // of a kernel that is told when it runs: 8 where rows have factors, else 16

// What a scale tile consists of.
template <int kScaleBits> struct StoredScale { using Type = uint16; };
template <> struct StoredScale<8> { using Type = uint8; };

// The value of a plane's scale, of an offset: in units of rowFactor().
template <int kScaleBits>
__device__ __forceinline__ float scaleValue(typename StoredScale<kScaleBits>::Type stored) {
    if constexpr (kScaleBits == 16) return halfToFloat(stored);
    else return float(stored);
}

template <int kScaleBits>
__device__ __forceinline__ float offsetValue(typename StoredScale<kScaleBits>::Type stored) {
    if constexpr (kScaleBits == 16) return halfToFloat(stored);
    else return float(int8(stored));
}

// What the codes of a row count in; 1 with fp16 scales.
template <int kScaleBits>
__device__ __forceinline__ float rowFactor(const uint16* factors, int nTile, int row) {
    if (kScaleBits == 16 || (kScaleBits == kAnyScaleBits && !factors)) return 1.0f;
    else return halfToFloat(factors[size_t(nTile) * kTileN + row % 8 * kLaneRows + row / 8]);
}

// Index of the scale of (n tile, group, row of the tile, entry).
__device__ __forceinline__ size_t scaleIndex(int nTile, int groups, int group, int row, int entries, int entry) {
    const size_t block = size_t(nTile) * groups + group;
    return ((block * (kTileN / kLaneRows) + row % 8) * entries + entry) * kLaneRows + row / 8;
}
