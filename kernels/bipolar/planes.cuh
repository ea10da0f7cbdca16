// The prepared order of bipolar-INT operands and the recovery of their product; shared by the bipolar kernels.
//
//   tiles [row block of 64][k tile][plane][row of the block][128 bytes]      (quantkit/ops/bipolar/layout.py)
//     bits:  a k tile is 1024 columns, byte b of a line holds columns 8 b .. 8 b + 7, lowest bit first
//     bytes: a k tile is 128 columns, byte b of chunk c of a line is the code of column 8 b + c; one "plane". A word
//            of every plane, 32 columns, becomes a word of each of the eight chunks by exchanging bits alone (CodeWords)
//     The 16-byte chunk c of the line of row r stands at c ^ (r % 8): the 128-byte swizzle of shared memory, so a
//     tile is copied as it is and read without bank conflicts. Columns behind K and rows behind the last are 0.
//     Tile rows of x are tokens in order; those of W are features in the order of featureOfRow.
//
// With c_x = 2^q - 1, c_w = 2^p - 1 and unsigned codes U (formats/bipolar.py):
//     v = X . W = 4 U_x . U_w - 2 c_w rowsum(U_x) - 2 c_x rowsum(U_w) + K c_x c_w,     y = v * x_step * w_scale + bias
// Sums may wrap in 32 bits on the way: v itself fits (check_exact), and wrapping additions end at the right value.
// With a zero point z per token codes of x stand for 2 U_x - 2 z, so c_x becomes 2 z, a number of the token's own.
#pragma once
#include "../shared/common.cuh"

constexpr int kBlockRows = QK_BLOCK_ROWS;
constexpr int kLineBytes = QK_LINE_BYTES;
constexpr int kChunkBytes = QK_CHUNK_BYTES;
constexpr int kOrderRows = QK_ORDER_ROWS;  // rows of W among which features have an order of their own
constexpr int kChunksPerLine = kLineBytes / kChunkBytes;
constexpr int kChunkWords = kChunkBytes / sizeof(uint32);
constexpr int kBitsPerLine = kLineBytes * kBitsPerByte;
constexpr int kPlaneBytes = kBlockRows * kLineBytes;  // one plane of one block of one k tile

// Byte offset of the line of one row and plane.
__device__ __forceinline__ size_t lineOffset(int row, int kTile, int kTiles, int plane, int planes) {
    const size_t block = row / kBlockRows;
    return ((block * kTiles + kTile) * planes + plane) * kPlaneBytes + (row % kBlockRows) * kLineBytes;
}

// Byte offset of chunk c within the line of a row.
__device__ __forceinline__ int chunkOffset(int chunk, int row) { return (chunk ^ (row % 8)) * kChunkBytes; }

// Word i of lane t of four neighbouring lanes becomes word t of lane i.
__device__ __forceinline__ void transposeWords(uint32 (&words)[kChunkWords]) {
#pragma unroll
    for (int distance = kChunkWords / 2; distance > 0; distance /= 2) {
        const bool upper = threadIdx.x & distance;
#pragma unroll
        for (int i = 0; i < kChunkWords; i++) {
            if (i & distance) continue;
            const uint32 other = __shfl_xor_sync(kFullWarp, upper ? words[i] : words[i + distance], distance);
            (upper ? words[i] : words[i + distance]) = other;
        }
    }
}

// Transpose blocks of kGroup x kGroup bits: afterwards bit i of each block of words[p] is bit p of that block of words[i].
// Blocks exchange their quarters, then these quarters theirs ...
template <int kGroup, int kWords>
__device__ __forceinline__ void exchangeBits(uint32 (&words)[kWords]) {
    // Bits whose number has the bit `distance` clear.
    constexpr uint32 kLowBits[] = {0, 0x55555555u, 0x33333333u, 0, 0x0F0F0F0Fu};
#pragma unroll
    for (int distance = kGroup / 2; distance > 0; distance /= 2) {
        const uint32 low = kLowBits[distance];
#pragma unroll
        for (int i = 0; i < kGroup; i++) {
            if (i & distance) continue;
            const uint32 a = words[i], b = words[i + distance];
            words[i] = (a & low) | (b << distance & ~low);
            words[i + distance] = (a >> distance & low) | (b & ~low);
        }
    }
}

// The codes of 32 neighbouring columns from a word of each plane: byte b of codes(i) is that of column 8 b + i.
template <int kBits>
struct CodeWords {
    static constexpr int kGroup = kBits > 4 ? 8 : kBits > 2 ? 4 : kBits;  // bits that a code takes in a word
    static constexpr uint32 kMask = 0x01010101u * ((1u << kGroup) - 1);
    uint32 words[kGroup];

    __device__ __forceinline__ explicit CodeWords(const uint32 (&planes)[kBits]) {
#pragma unroll
        for (int i = 0; i < kGroup; i++) words[i] = i < kBits ? planes[i < kBits ? i : 0] : 0;
        exchangeBits<kGroup>(words);
    }
    __device__ __forceinline__ uint32 codes(int i) const { return words[i % kGroup] >> i / kGroup * kGroup & kMask; }
};

// The feature in row r of a weight tile: among 32 rows, bits c c t t e of the row number are bits t t c c e of the
// feature's. A thread's results for four neighbouring groups of 8 rows are then 8 neighbouring features.
__device__ __forceinline__ int featureOfRow(int row) {
    return (row & ~(kOrderRows - 1)) | (row / 2 % 4) << 3 | (row / 8 % 4) << 1 | row % 2;
}

// Largest values of the two widths: c_x and c_w; or kCodedLimit (scales.cuh) for c_w.
struct Widths {
    int actLimit, weightLimit;
};

// What a row of either operand adds to the product: v = 4 dot + tokenTerm + featureTerm.
__device__ __forceinline__ int tokenTerm(int rowSum, Widths w) { return -2 * w.weightLimit * rowSum; }
__device__ __forceinline__ int featureTerm(int rowSum, Widths w, int K) {
    return w.actLimit * (K * w.weightLimit - 2 * rowSum);
}

// With zero points (kZero) featureTerm takes 1 for c_x, and the token brings 2 z: twiceZero(xSums, m, M).
template <bool kZero>
__device__ __forceinline__ Widths featureWidths(Widths w) {
    return Widths{kZero ? 1 : w.actLimit, w.weightLimit};
}

// What the feature's term counts for this token; 1 without zero points. sums: [M] of codes, then [M] of 2 z.
template <bool kZero>
__device__ __forceinline__ int twiceZero(const int* __restrict__ sums, int m, int M) {
    return kZero ? sums[size_t(M) + m] : 1;
}

// One rounding per operation and no contraction: the reference twin computes the same bits.
__device__ __forceinline__ float scaled(float v, float step, float scale, float bias) {
    return __fadd_rn(__fmul_rn(v, __fmul_rn(step, scale)), bias);
}

__device__ __forceinline__ float recovered(int dot, int ofToken, int ofFeature, float step, float scale, float bias) {
    return scaled(__int2float_rn(4 * dot + ofToken + ofFeature), step, scale, bias);
}
