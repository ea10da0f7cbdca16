// bipolarExpand: weight planes to one byte per code, the operand of the INT8 products (weight_bits x act_bits > 8).
//
//   tiles [blocks, k tiles of 1024, kWeightBits planes, 64, 128] -> codes [blocks, k tiles of 128, 1, 64, 128]
//
// grid: (k tiles of 1024, row blocks); block: 8 warps, a warp takes every eighth row; a lane 32 columns of it: one
// word per plane in, two 16-byte chunks out. Byte B of the planes' words is an 8 x 8 block of bits, which exchanging
// turns into the codes of columns 8 B .. 8 B + 7, one per word; bytes are then put in order. Layouts: bipolar.cuh.
#include "bipolar.cuh"
#include "mma.cuh"

constexpr int kWarps = 8, kRowsAhead = 2;

// words[i] byte B -> out[B] byte i.
__device__ __forceinline__ void transposeBytes(const uint32* words, uint32 (&out)[4]) {
    const uint32 low01 = selectBytes(words[0], words[1], 0x5140), low23 = selectBytes(words[2], words[3], 0x5140);
    const uint32 high01 = selectBytes(words[0], words[1], 0x7362), high23 = selectBytes(words[2], words[3], 0x7362);
    out[0] = selectBytes(low01, low23, 0x5410);
    out[1] = selectBytes(low01, low23, 0x7632);
    out[2] = selectBytes(high01, high23, 0x5410);
    out[3] = selectBytes(high01, high23, 0x7632);
}

template <int kWeightBits>
__global__ void __launch_bounds__(kWarps * kWarpSize)
    bipolarExpand(const uint8* __restrict__ tiles, uint8* __restrict__ codes, int K) {
    const int stretch = blockIdx.x, lane = threadIdx.x % kWarpSize;
    const int stretches = gridDim.x, kTiles = (K + kLineBytes - 1) / kLineBytes;
    const int kTile = stretch * kChunksPerLine + lane / 4;
    if (kTile >= kTiles) return;
#pragma unroll kRowsAhead
    for (int r = threadIdx.x / kWarpSize; r < kBlockRows; r += kWarps) {
        const int row = blockIdx.y * kBlockRows + r;
        uint32 words[kBitsPerByte] = {};
#pragma unroll
        for (int i = 0; i < kWeightBits; i++) {
            const size_t line = lineOffset(row, stretch, stretches, i, kWeightBits);
            words[i] = *reinterpret_cast<const uint32*>(tiles + line + chunkOffset(lane / 4, row) + lane % 4 * 4);
        }
        exchangeBits<kBitsPerByte>(words);
        uint32 first[4], second[4];  // of bytes B: columns 8 B .. 8 B + 3 and 8 B + 4 ..
        transposeBytes(words, first);
        transposeBytes(words + 4, second);
        uint8* line = codes + lineOffset(row, kTile, kTiles, 0, 1);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            *reinterpret_cast<uint4*>(line + chunkOffset(lane % 4 * 2 + half, row)) =
                make_uint4(first[2 * half], second[2 * half], first[2 * half + 1], second[2 * half + 1]);
        }
    }
}
