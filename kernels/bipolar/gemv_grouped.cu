// bipolarGemvGrouped: y[M, N] = x W^T + bias for few tokens and a weight with a scale per row and line of 128 columns, on
// the binary tensor cores.
//
//   dot[pair, n, l] = sum_(k in line l) x_bit[pair, k] v_w[n, k],  v_w = sum_i 2^(i + 1) w_bit_i - (2^p - 1)
//   y[m, n] = step[m] (2 sum_j 2^j sum_l scale[n, l] dot[(m, j), n, l] - c[m] offset[n]) + bias[n]
//
// Grid, warps and columns of B are those of gemv.cu; scaleTiles, offset and c are those of gemm_grouped.cu. A chunk of 16
// bytes of a plane holds a line. Four lanes load four chunks of a row, one each, and exchange words: then all four hold a
// quarter of the same line, and a product m16n8k128 has one scale. One product more, with ones in place of a plane, counts
// the bits of x. Integers become floats behind every line. Sums over lines are fp32 in a fixed order: results repeat bit
// for bit.
#include "gemv.cuh"

// Chunk t of four lanes to word t of each of the four chunks.
__device__ __forceinline__ void exchange(uint4 chunk, uint32 (&words)[kHalfChunks]) {
    words[0] = chunk.x, words[1] = chunk.y, words[2] = chunk.z, words[3] = chunk.w;
    transposeWords(words);
}

template <int kWeightBits, int kGroups>
__global__ void __launch_bounds__(kWarps * kWarpSize, 1)
    bipolarGemvGrouped(const uint8* __restrict__ xTiles, const uint8* __restrict__ wTiles,  // planes.cuh, bits
                       const uint32* __restrict__ scaleTiles, const float* __restrict__ offsets,  // pairs of fp16; [N]
                       const int* __restrict__ xSums, const float* __restrict__ xSteps,     // [M] or [2, M]; [M]
                       const void* __restrict__ bias, void* __restrict__ y,                 // [N], [M, N] of dtype
                       int M, int N, int K, int actBits, int zero, int dtype) {
    constexpr int kColumns = kGroups * kPairColumns, kLimit = (1 << kWeightBits) - 1;
    __shared__ float sums[kWarps][kRows][kColumns];
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, g = lane / 4, t = lane % 4;
    const int kTiles = (K + kBitsPerLine - 1) / kBitsPerLine;
    const int tokens = kColumns / actBits;  // whole tokens per block, at least 1
    const int row = blockIdx.x * kRows + g, firstToken = blockIdx.y * tokens;

    const PairLines<kGroups> pairs(xTiles, firstToken, tokens, M, kTiles, actBits, g);
    float total[kGroups][4] = {};
#pragma unroll 1
    for (int half = warp; half < 2 * kTiles; half += kWarps) {
        const int kTile = half / 2, first = half % 2 * kHalfChunks, chunk = first + t;
        uint4 upper[kWeightBits], lower[kWeightBits];
        uint32 scales[kHalfChunks];
#pragma unroll
        for (int i = 0; i < kWeightBits; i++) {
            const uint8* line = wTiles + lineOffset(row, kTile, kTiles, i, kWeightBits) + chunkOffset(chunk, row);
            upper[i] = __ldcs(reinterpret_cast<const uint4*>(line));
            lower[i] = __ldcs(reinterpret_cast<const uint4*>(line + kPairColumns * kLineBytes));
        }
        const size_t stretch = size_t(row / kBlockRows) * kTiles + kTile;
#pragma unroll
        for (int c = 0; c < kHalfChunks; c++) {
            const int ofRows = row % kBlockRows / kRows * kPairColumns + g;
            scales[c] = scaleTiles[(stretch * kChunksPerLine + first + c) * (kBlockRows / 2) + ofRows];
        }
        uint32 x[kGroups][kHalfChunks];
#pragma unroll
        for (int n = 0; n < kGroups; n++) exchange(pairs.chunk(n, kTile, chunk), x[n]);
        int dots[kGroups][kHalfChunks][4];
#pragma unroll
        for (int n = 0; n < kGroups; n++) {
#pragma unroll
            for (int c = 0; c < kHalfChunks; c++) {
                binaryCount128(dots[n][c], ~0u, ~0u, x[n][c]);
#pragma unroll
                for (int e = 0; e < 4; e++) dots[n][c][e] *= -kLimit;
            }
        }
#pragma unroll
        for (int i = 0; i < kWeightBits; i++) {
            uint32 ofUpper[kHalfChunks], ofLower[kHalfChunks];
            exchange(upper[i], ofUpper);
            exchange(lower[i], ofLower);
#pragma unroll
            for (int n = 0; n < kGroups; n++) {
#pragma unroll
                for (int c = 0; c < kHalfChunks; c++) {
                    int part[4];
                    binaryCount128(part, ofUpper[c], ofLower[c], x[n][c]);
#pragma unroll
                    for (int e = 0; e < 4; e++) dots[n][c][e] += part[e] << (i + 1);
                }
            }
        }
#pragma unroll
        for (int c = 0; c < kHalfChunks; c++) {
            const float scale[2] = {halfToFloat(uint16(scales[c])), halfToFloat(uint16(scales[c] >> 16))};
#pragma unroll
            for (int n = 0; n < kGroups; n++) {
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    total[n][e] = __fmaf_rn(scale[e / 2], __int2float_rn(dots[n][c][e]), total[n][e]);
                }
            }
        }
    }
#pragma unroll
    for (int n = 0; n < kGroups; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) sums[warp][g + 8 * (e / 2)][n * kPairColumns + 2 * t + e % 2] = total[n][e];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kRows * tokens; i += kWarps * kWarpSize) {
        const int n = featureOfRow(blockIdx.x * kRows + i % kRows), m = firstToken + i / kRows;
        if (n >= N || m >= M) continue;
        float dot = 0.f;
        for (int j = 0; j < actBits; j++) {
            float ofPlane = 0.f;
#pragma unroll
            for (int w = 0; w < kWarps; w++) ofPlane += sums[w][i % kRows][i / kRows * actBits + j];
            dot = __fmaf_rn(ofPlane, float(2 << j), dot);
        }
        const float c = float(zero ? xSums[size_t(M) + m] : (1 << actBits) - 1);
        const float v = __fadd_rn(dot, -__fmul_rn(c, offsets[n]));
        storeElement(y, size_t(m) * N + n, __fmaf_rn(v, xSteps[m], bias == nullptr ? 0.f : loadElement(bias, n, dtype)), dtype);
    }
}
