// Scale codes of a weight in planes. A row and group of columns may have a code s that counts in the row's scale; W, which is
// s (2 U_w - c_w), is then a signed byte. As an unsigned code it is U_s = W + 128, and with 256 for c_w (kCodedLimit) the formula
// of planes.cuh gives 2 X . W: one sum of integers for the whole row, of the same products. A group is whole lines of 128 columns.
//   scaleTiles [row block of 64][k tile of bits][8 lines][16 w + 2 g + h] bytes: of tile row 16 w + g + 8 h; 0 behind the last
#pragma once
#include "planes.cuh"

constexpr int kCodedLimit = QK_CODED_LIMIT;

// What an integer counts in for a row of W. The integers of scale codes are twice X . W.
__device__ __forceinline__ float weightScale(uint16 scale, Widths w) {
    return halfToFloat(scale) * (w.weightLimit == kCodedLimit ? 0.5f : 1.f);
}

// What makes codes u of p bits of a row and line the bytes (2 u - (2^p - 1)) s + 128, four of a word at a time: no byte carries
// into the next while s (2^p - 1) < 128.
template <int kBits>
struct ScaleCode {
    static constexpr uint32 kEveryByte = 0x01010101u;
    uint32 factor, offset;

    __device__ __forceinline__ explicit ScaleCode(uint32 code)
        : factor(2 * code), offset(kEveryByte * 128 - code * (kEveryByte * ((1u << kBits) - 1))) {}
    __device__ __forceinline__ uint32 bytes(uint32 codes) const { return codes * factor + offset; }
};

// Where the scale code of a tile row stands among the 64 of a line.
__device__ __forceinline__ int scalePlace(int row) { return row / 16 * 16 + row % 8 * 2 + row / 8 % 2; }
