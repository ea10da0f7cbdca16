// bipolarExpand: weight planes to one byte per code, the operand of the INT8 products (weight_bits x act_bits > 8).
//
//   tiles [blocks, k tiles of 1024, kWeightBits planes, 64, 128] -> codes [blocks, k tiles of 128, 1, 64, 128]
//
// grid: (k tiles of 1024, row blocks); block: 8 warps, a warp takes every eighth row; a lane 32 columns of it: one
// word per plane in, two 16-byte chunks out. Layouts: bipolar.cuh.
#include "bipolar.cuh"

constexpr int kWarps = 8;

// Bits s .. s + 3 of a word as the lowest bits of four bytes: the multiplier shifts bit i to bit 8 i.
__device__ __forceinline__ uint32 spreadBits(uint32 word, int s) {
    constexpr uint32 kSpread = 0x00204081u, kLowest = 0x01010101u;
    return ((word >> s & 0xFu) * kSpread) & kLowest;
}

template <int kWeightBits>
__global__ void __launch_bounds__(kWarps * kWarpSize)
    bipolarExpand(const uint8* __restrict__ tiles, uint8* __restrict__ codes, int K) {
    const int stretch = blockIdx.x, lane = threadIdx.x % kWarpSize;
    const int stretches = gridDim.x, kTiles = (K + kLineBytes - 1) / kLineBytes;
    const int kTile = stretch * kChunksPerLine + lane / 4;
    for (int r = threadIdx.x / kWarpSize; r < kBlockRows; r += kWarps) {
        const int row = blockIdx.y * kBlockRows + r;
        uint32 plane[kWeightBits];
#pragma unroll
        for (int i = 0; i < kWeightBits; i++) {
            const size_t line = lineOffset(row, stretch, stretches, i, kWeightBits);
            plane[i] = *reinterpret_cast<const uint32*>(tiles + line + chunkOffset(lane / 4, row) + lane % 4 * 4);
        }
        if (kTile >= kTiles) continue;
        uint8* line = codes + lineOffset(row, kTile, kTiles, 0, 1);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint32 word[4] = {0, 0, 0, 0};
#pragma unroll
            for (int w = 0; w < 4; w++) {
#pragma unroll
                for (int i = 0; i < kWeightBits; i++) {
                    word[w] |= spreadBits(plane[i], half * kChunkBytes + w * 4) << i;
                }
            }
            *reinterpret_cast<uint4*>(line + chunkOffset(lane % 4 * 2 + half, row)) =
                make_uint4(word[0], word[1], word[2], word[3]);
        }
    }
}
