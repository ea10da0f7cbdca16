// bipolarGemv: y[M, N] = x W^T + bias for few tokens, on the binary tensor cores of any GPU from sm_80 on.
//
// Weight bits are read once and multiplied as they lie: mma m16n8k256 takes 16 features x 256 columns of one weight
// plane as A, and one (token, plane) pair per column of B. The k-th bits of A and B only have to be the same columns
// of the matrices, so a lane hands over the 16-byte chunks it loads, in whatever order.
//
//   grid: (ceil(N / 32) * 2, token groups); block: kWarps warps, warp w takes halves of k tiles w, w + kWarps, ...
//   column of B: token * actBits + plane; kGroups * 8 columns per block
//
// kZero: tokens have zero points. Integer sums in a fixed order: results repeat bit for bit. Layouts and formula:
// planes.cuh.
#include "gemv.cuh"

template <int kWeightBits, int kGroups, bool kZero>
__global__ void __launch_bounds__(kWarps * kWarpSize, kGroups < 4 ? 2 : 1)
    bipolarGemv(const uint8* __restrict__ xTiles, const uint8* __restrict__ wTiles,      // planes.cuh, bits
                const int* __restrict__ xSums, const int* __restrict__ wSums,            // [M], [N]
                const float* __restrict__ xSteps, const uint16* __restrict__ wScales,    // [M] fp32, [N] fp16
                const void* __restrict__ bias, void* __restrict__ y,                     // [N], [M, N] of dtype
                int M, int N, int K, int actBits, int dtype) {
    constexpr int kColumns = kGroups * kPairColumns;
    static_assert(kGroups <= 4, "more would not fit the registers");
    __shared__ int sums[kWarps][kRows][kColumns];
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, g = lane / 4, t = lane % 4;
    const int kTiles = (K + kBitsPerLine - 1) / kBitsPerLine;
    const int tokens = kColumns / actBits;  // whole tokens per block, at least 1
    const int row = blockIdx.x * kRows + g, firstToken = blockIdx.y * tokens;
    const Widths widths{(1 << actBits) - 1, (1 << kWeightBits) - 1};

    const PairLines<kGroups> x(xTiles, firstToken, tokens, M, kTiles, actBits, g);
    int total[kGroups][4] = {};
#pragma unroll 1
    for (int half = warp; half < 2 * kTiles; half += kWarps) {
        const int kTile = half / 2, chunk = half % 2 * kHalfChunks + t;
        uint4 upper[kWeightBits], lower[kWeightBits];
#pragma unroll
        for (int i = 0; i < kWeightBits; i++) {
            const uint8* line = wTiles + lineOffset(row, kTile, kTiles, i, kWeightBits) + chunkOffset(chunk, row);
            upper[i] = __ldcs(reinterpret_cast<const uint4*>(line));
            lower[i] = __ldcs(reinterpret_cast<const uint4*>(line + kPairColumns * kLineBytes));
        }
#pragma unroll
        for (int n = 0; n < kGroups; n++) {
            const uint4 b = x.chunk(n, kTile, chunk);
#pragma unroll
            for (int i = 0; i < kWeightBits; i++) {
                int part[4] = {0, 0, 0, 0};
                binaryMma256(part, make_uint4(upper[i].x, lower[i].x, upper[i].y, lower[i].y), b.x, b.y);
                binaryMma256(part, make_uint4(upper[i].z, lower[i].z, upper[i].w, lower[i].w), b.z, b.w);
#pragma unroll
                for (int e = 0; e < 4; e++) total[n][e] += part[e] << i;
            }
        }
    }
#pragma unroll
    for (int n = 0; n < kGroups; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) sums[warp][g + 8 * (e / 2)][n * kPairColumns + 2 * t + e % 2] = total[n][e];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kRows * kColumns; i += kWarps * kWarpSize) {
        int sum = 0;
#pragma unroll
        for (int w = 0; w < kWarps; w++) sum += (&sums[w][0][0])[i];
        (&sums[0][0][0])[i] = sum;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kRows * tokens; i += kWarps * kWarpSize) {
        const int n = featureOfRow(blockIdx.x * kRows + i % kRows), m = firstToken + i / kRows;
        if (n >= N || m >= M) continue;
        int dot = 0;
        for (int j = 0; j < actBits; j++) dot += sums[0][i % kRows][i / kRows * actBits + j] << j;
        const float value = recovered(dot, tokenTerm(xSums[m], widths),
                                      featureTerm(wSums[n], featureWidths<kZero>(widths), K) *
                                          twiceZero<kZero>(xSums, m, M),
                                      xSteps[m],
                                      halfToFloat(wScales[n]),
                                      bias == nullptr ? 0.f : loadElement(bias, n, dtype));
        storeElement(y, size_t(m) * N + n, value, dtype);
    }
}
