// bipolarExpand: weight planes to one byte per code, the operand of the INT8 products (weight_bits x act_bits > 8).
//
//   tiles [blocks, k tiles of 1024, kWeightBits planes, 64, 128] -> codes [blocks, k tiles of 128, 1, 64, 128]
//
// grid: (k tiles of 1024, row blocks); block: 8 warps, a warp takes every eighth row; a lane 32 columns of it: one
// word per plane in, two 16-byte chunks out. Byte B of the planes' words is an 8 x 8 block of bits, which exchanging
// turns into the codes of columns 8 B .. 8 B + 7, one per word; bytes are then put in order. Lanes exchange a chunk with
// their neighbours, so that each store of a warp fills whole sectors of memory. Layouts: planes.cuh.
#include "planes.cuh"
#include "../shared/mma.cuh"

constexpr int kWarps = QK_EXPAND_WARPS, kWarpRows = kBlockRows / kWarps;
constexpr int kWordsAhead = 16;  // per lane, on their way from memory

// words[i] byte B -> out[B] byte i.
__device__ __forceinline__ void transposeBytes(const uint32* words, uint32 (&out)[4]) {
    const uint32 low01 = selectBytes(words[0], words[1], 0x5140), low23 = selectBytes(words[2], words[3], 0x5140);
    const uint32 high01 = selectBytes(words[0], words[1], 0x7362), high23 = selectBytes(words[2], words[3], 0x7362);
    out[0] = selectBytes(low01, low23, 0x5410);
    out[1] = selectBytes(low01, low23, 0x7632);
    out[2] = selectBytes(high01, high23, 0x5410);
    out[3] = selectBytes(high01, high23, 0x7632);
}

// Lanes 2 i and 2 i + 1 hold chunks 0, 1 and 2, 3 of four; afterwards 0, 2 and 1, 3.
__device__ __forceinline__ void exchangeChunks(uint32 (&low)[4], uint32 (&high)[4]) {
    const bool odd = threadIdx.x % 2;
#pragma unroll
    for (int w = 0; w < 4; w++) {
        const uint32 other = __shfl_xor_sync(kFullWarp, odd ? low[w] : high[w], 1);
        (odd ? low[w] : high[w]) = other;
    }
}

template <int kWeightBits>
__global__ void __launch_bounds__(kWarps * kWarpSize)
    bipolarExpand(const uint8* __restrict__ tiles, uint8* __restrict__ codes, int K) {
    constexpr int kAhead = kWordsAhead / kWeightBits < kWarpRows ? kWordsAhead / kWeightBits : kWarpRows;
    const int stretch = blockIdx.x, lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const int stretches = gridDim.x, kTiles = (K + kLineBytes - 1) / kLineBytes;
    const int kTile = stretch * kChunksPerLine + lane / 4;
    const bool inside = kTile < kTiles;
#pragma unroll 1
    for (int start = 0; start < kWarpRows; start += kAhead) {
        uint32 words[kAhead][kBitsPerByte] = {};
#pragma unroll
        for (int a = 0; a < kAhead; a++) {
            const int row = blockIdx.y * kBlockRows + (start + a) * kWarps + warp;
#pragma unroll
            for (int i = 0; i < kWeightBits; i++) {
                const size_t line = lineOffset(row, stretch, stretches, i, kWeightBits);
                const uint8* word = tiles + line + chunkOffset(lane / 4, row) + lane % 4 * 4;
                if (start + a < kWarpRows) words[a][i] = *reinterpret_cast<const uint32*>(word);
            }
        }
#pragma unroll
        for (int a = 0; a < kAhead; a++) {
            const int row = blockIdx.y * kBlockRows + (start + a) * kWarps + warp;
            exchangeBits<kBitsPerByte>(words[a]);
            uint32 even[4], odd[4];  // of bytes B: columns 8 B .. 8 B + 3 and 8 B + 4 ..
            transposeBytes(words[a], even);
            transposeBytes(words[a] + 4, odd);
            uint32 low[4] = {even[0], odd[0], even[1], odd[1]}, high[4] = {even[2], odd[2], even[3], odd[3]};
            exchangeChunks(low, high);
            if (!inside || start + a >= kWarpRows) continue;
            uint8* line = codes + lineOffset(row, kTile, kTiles, 0, 1);
            const int chunk = lane % 4 / 2 * 4 + lane % 2;
            *reinterpret_cast<uint4*>(line + chunkOffset(chunk, row)) = make_uint4(low[0], low[1], low[2], low[3]);
            *reinterpret_cast<uint4*>(line + chunkOffset(chunk + 2, row)) = make_uint4(high[0], high[1], high[2], high[3]);
        }
    }
}
