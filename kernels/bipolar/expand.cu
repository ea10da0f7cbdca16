// bipolarExpand: weight planes to one byte per code, the operand of the INT8 products (weight_bits x act_bits > 8); with scale
// codes (kCoded) the byte that has them in it.
//
//   tiles [blocks, k tiles of 1024, kWeightBits planes, 64, 128] -> codes [blocks, k tiles of 128, 1, 64, 128]
//
// grid: (k tiles of 1024, row blocks); block: 8 warps, a warp takes every eighth row; a lane 32 columns of it: one word
// per plane in, one word of each chunk out. Four lanes exchange words, so that each stores two whole chunks. Layouts:
// planes.cuh.
#include "scales.cuh"
#include "../shared/mma.cuh"

constexpr int kWarps = QK_EXPAND_WARPS, kWarpRows = kBlockRows / kWarps;
constexpr int kWordsAhead = 16;  // per lane, on their way from memory

template <int kWeightBits, bool kCoded>
__global__ void __launch_bounds__(kWarps * kWarpSize)
    bipolarExpand(const uint8* __restrict__ tiles, const uint8* __restrict__ scaleTiles,  // scales.cuh, or null
                  uint8* __restrict__ codes, int K) {
    constexpr int kAhead = kWordsAhead / kWeightBits < kWarpRows ? kWordsAhead / kWeightBits : kWarpRows;
    const int stretch = blockIdx.x, lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const int stretches = gridDim.x, kTiles = (K + kLineBytes - 1) / kLineBytes;
    const int kTile = stretch * kChunksPerLine + lane / kChunkWords;
#pragma unroll 1
    for (int start = 0; start < kWarpRows; start += kAhead) {
        uint32 words[kAhead][kWeightBits] = {}, scales[kAhead] = {};
#pragma unroll
        for (int a = 0; a < kAhead; a++) {
            const int row = blockIdx.y * kBlockRows + (start + a) * kWarps + warp;
#pragma unroll
            for (int i = 0; i < kWeightBits; i++) {
                const size_t line = lineOffset(row, stretch, stretches, i, kWeightBits);
                const uint8* word = tiles + line + chunkOffset(lane / kChunkWords, row) + lane % kChunkWords * 4;
                if (start + a < kWarpRows) words[a][i] = *reinterpret_cast<const uint32*>(word);
            }
            if constexpr (kCoded) {
                const size_t line = (size_t(blockIdx.y) * stretches + stretch) * kChunksPerLine + lane / kChunkWords;
                if (start + a < kWarpRows) scales[a] = scaleTiles[line * kBlockRows + scalePlace(row % kBlockRows)];
            }
        }
#pragma unroll
        for (int a = 0; a < kAhead; a++) {
            const int row = blockIdx.y * kBlockRows + (start + a) * kWarps + warp;
            const CodeWords<kWeightBits> expanded(words[a]);
            const ScaleCode<kWeightBits> scale(scales[a]);
            uint8* line = codes + lineOffset(row, kTile, kTiles, 0, 1);
#pragma unroll
            for (int half = 0; half < kChunksPerLine; half += kChunkWords) {
                uint32 chunk[kChunkWords];
#pragma unroll
                for (int i = 0; i < kChunkWords; i++) {
                    const uint32 found = expanded.codes(half + i);
                    chunk[i] = kCoded ? scale.bytes(found) : found;
                }
                transposeWords(chunk);
                if (kTile >= kTiles || start + a >= kWarpRows) continue;
                *reinterpret_cast<uint4*>(line + chunkOffset(half + lane % kChunkWords, row)) =
                    make_uint4(chunk[0], chunk[1], chunk[2], chunk[3]);
            }
        }
    }
}
