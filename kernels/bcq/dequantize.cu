// weight[n][k] = sum_i scales[i][n][k / g] * (2 signs[i][n][k] - 1) + offset[n][k / g]      (nuQmm Eq 1, section 5.1)
//
// Reads the prepared order (tiles.cuh), writes row-major [N, K] fp16, bf16 or fp32 for cuBLAS.
// Grid: one warp per (n tile, k tile), flattened; a warp's four lanes of a row share one 32-column word at a time,
// eight columns each, so that they write 64 consecutive bytes (fp16). Sums in fp32, planes in order.
// Limits: group_size a multiple of 8.
#include "level_codes.cuh"

namespace {

constexpr int kColumnsPerLane = kBitsPerByte;

__device__ __forceinline__ void storeEight(void* weight, size_t index, const float (&values)[8], int valid, int dtype,
                                           bool vectors) {
    if (vectors && dtype != kFloat32) {
        uint32 packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            packed[i] = floatToShort(values[2 * i], dtype) | uint32(floatToShort(values[2 * i + 1], dtype)) << 16;
        }
        *reinterpret_cast<uint4*>(static_cast<uint16*>(weight) + index) =
            make_uint4(packed[0], packed[1], packed[2], packed[3]);
        return;
    }
#pragma unroll
    for (int i = 0; i < kColumnsPerLane; ++i) {
        if (i < valid) storeElement(weight, index + i, values[i], dtype);
    }
}

// The order for batches -> that of sign tiles (tiles.cuh).
template <int kBits, bool kGrid>
__device__ __forceinline__ void codesToPlanes(uint4 (&words)[kBits], int lane) {
    uint32 own[4][kBits];
#pragma unroll
    for (int i = 0; i < kBits; ++i) own[0][i] = words[i].x, own[1][i] = words[i].y, own[2][i] = words[i].z, own[3][i] = words[i].w;
#pragma unroll
    for (int part = 0; part < 4; ++part) {
        wordsToPlanes<kBits, kGrid>(own[part]);
#pragma unroll
        for (int i = 0; i < kBits; ++i) own[part][i] = neighbouringColumns<kBits, kGrid>(own[part][i], lane);
    }
#pragma unroll
    for (int i = 0; i < kBits; ++i) words[i] = make_uint4(own[0][i], own[1][i], own[2][i], own[3][i]);
}

}  // namespace

template <int kBits,       // planes
          int kScaleBits,  // 16 or 8
          int kOrder>      // kPlaneOrder, kCodeOrder or kGridOrder
__global__ void __launch_bounds__(QK_DEQUANTIZE_THREADS, 2)
bcqDequantize(const uint4* __restrict__ tiles,     // sign tiles
              const typename StoredScale<kScaleBits>::Type* __restrict__ scales,  // scale tiles
              const uint16* __restrict__ factors,  // factor tiles; null with fp16 scales
              void* __restrict__ weight,           // [N, K]
              int N, int K,
              int groups,                          // scale groups per row
              int groupSize,                       // columns per group
              int entries,                         // kBits, or kBits + 1 with an offset
              int dtype) {
    constexpr bool kGrid = kOrder == kGridOrder;
    constexpr int kScales = kGrid ? 1 : kBits;  // of a group
    const int lane = threadIdx.x % kWarpSize, quad = lane % kTileQuads, g = lane / kTileQuads;
    const int kTiles = (K + kTileK - 1) / kTileK;
    const int nTiles = (N + kTileN - 1) / kTileN;
    const int tile = (blockIdx.x * blockDim.x + threadIdx.x) / kWarpSize;
    if (tile >= nTiles * kTiles) return;
    const int nTile = tile / kTiles, kTile = tile % kTiles;
    const bool vectors = K % kColumnsPerLane == 0;

    uint4 words[kBits];
#pragma unroll
    for (int i = 0; i < kBits; ++i) words[i] = __ldcs(tiles + (size_t(tile) * kBits + i) * kWarpSize + lane);
    if constexpr (kOrder != kPlaneOrder) codesToPlanes<kBits, kOrder == kGridOrder>(words, lane);

#pragma unroll
    for (int part = 0; part < kWordsPerTileRow / kTileQuads * 2; ++part) {  // x, y, z, w of the lane's words
        const int row = g + (part % 2) * 8, n = nTile * kTileN + row;
        const float factor = rowFactor<kScaleBits>(factors, nTile, row);
#pragma unroll 1
        for (int owner = 0; owner < kTileQuads; ++owner) {
            const int word = owner + (part / 2) * kTileQuads;
            const int k = kTile * kTileK + word * kBitsPerWord + quad * kColumnsPerLane;
            uint32 bytes[kBits];
#pragma unroll
            for (int i = 0; i < kBits; ++i) {
                const uint4 mine = words[i];
                const uint32 own = part == 0 ? mine.x : part == 1 ? mine.y : part == 2 ? mine.z : mine.w;
                bytes[i] = __shfl_sync(kFullWarp, own, g * kTileQuads + owner) >> (quad * kBitsPerByte);
            }
            if (n >= N || k >= K) continue;
            const int group = k / groupSize;
            const auto* entry = scales + scaleIndex(nTile, groups, group, row, entries, 0);
            float values[kColumnsPerLane];
            const float offset = entries > kScales ? offsetValue<kScaleBits>(entry[kScales * kLaneRows]) : 0.0f;
#pragma unroll
            for (int c = 0; c < kColumnsPerLane; ++c) values[c] = 0.0f;
#pragma unroll
            for (int i = 0; i < kBits; ++i) {
                const float stored = scaleValue<kScaleBits>(entry[(kGrid ? 0 : i) * kLaneRows]);
                const float scale = kGrid ? stored * float(1 << i) : stored;
#pragma unroll
                for (int c = 0; c < kColumnsPerLane; ++c) values[c] += (bytes[i] >> c) & 1 ? scale : -scale;
            }
#pragma unroll
            for (int c = 0; c < kColumnsPerLane; ++c) values[c] = (values[c] + offset) * factor;
            storeEight(weight, size_t(n) * K + k, values, K - k, dtype, vectors);
        }
    }
}
