// bipolarGemmMma: y[M, N] = x W^T + bias for bipolar-INT operands with warp-level products, on GPUs from sm_80 on.
//
// Formula and operand order: planes.cuh (Bipolar-INT sections 3.2, 4.1). A block makes 64 features x 64 tokens; its
// 8 warps 16 features x 32 tokens each: warp w has features 16 (w / 2) .., tokens 32 (w % 2) ... Planes with equal
// i + j share accumulators (4.2). A stage is half a line (64 bytes) of every plane of both operands, kStages of them
// in flight: half lines because sm_86 and sm_89 have 99 KiB of shared memory per block.
//
//   shared [stage][plane of W, then of x][64 rows][4 chunks]; chunk c of row r stands at c ^ (r / 2 % 4), so that the
//   8 rows of a matrix load touch 8 different 16-byte bank groups
//
// Integer sums in a fixed order: results repeat bit for bit.
#include "scales.cuh"
#include "../shared/mma.cuh"

constexpr int kWarps = QK_MMA_WARPS;
constexpr int kHalfChunks = 4;
constexpr int kHalfBytes = kHalfChunks * kChunkBytes;
constexpr int kHalfPlane = kBlockRows * kHalfBytes;
constexpr int kStepChunks = 2;   // chunks per product: 256 bits or 32 bytes
constexpr int kWarpTokens = 32;
constexpr int kTokenTiles = kWarpTokens / 8;

__device__ __forceinline__ int halfOffset(int row, int chunk) {
    return row * kHalfBytes + (chunk ^ (row / 2 % 4)) * kChunkBytes;
}

// Start copying one half line of every row and plane of a block of 64 rows.
template <int kPlanes>
__device__ __forceinline__ void copyHalf(uint32 shared, const uint8* tiles, int block, int kTile, int kTiles,
                                         int half) {
    for (int c = threadIdx.x; c < kPlanes * kBlockRows * kHalfChunks; c += kWarps * kWarpSize) {
        const int chunk = c % kHalfChunks, row = c / kHalfChunks % kBlockRows, plane = c / (kHalfChunks * kBlockRows);
        const size_t line = lineOffset(block * kBlockRows + row, kTile, kTiles, plane, kPlanes);
        copyAsync16(shared + plane * kHalfPlane + halfOffset(row, chunk),
                    tiles + line + chunkOffset(half * kHalfChunks + chunk, row));
    }
}

template <int kKind>
__device__ __forceinline__ void multiply(int (&sum)[4], uint4 a, uint32 b0, uint32 b1) {
    if constexpr (kKind == 0) {
        binaryMma256(sum, a, b0, b1);
    } else {
        byteMma32(sum, a, b0, b1);
    }
}

// All products of one stage for one warp. A: rows g, g + 8 (matrices 0, 1), the next 16 bytes (2, 3).
template <int kKind, int kPlanesW, int kPlanesX, int kLevels>
__device__ __forceinline__ void multiplyStage(int (&sums)[kLevels][kTokenTiles][4], uint32 stage, int n0,
                                              int m0, int lane) {
    const uint32 xStage = stage + kPlanesW * kHalfPlane;
    const int matrix = lane / 8, inMatrix = lane % 8;
#pragma unroll
    for (int step = 0; step < kHalfChunks / kStepChunks; step++) {
        uint4 w[kPlanesW];
#pragma unroll
        for (int i = 0; i < kPlanesW; i++) {
            const int row = n0 + inMatrix + 8 * (matrix % 2), chunk = step * kStepChunks + matrix / 2;
            w[i] = loadMatrices(stage + i * kHalfPlane + halfOffset(row, chunk));
        }
#pragma unroll
        for (int j = 0; j < kPlanesX; j++) {
#pragma unroll
            for (int pair = 0; pair < kTokenTiles / 2; pair++) {
                const int row = m0 + pair * 16 + inMatrix + 8 * (matrix / 2);
                const uint4 x = loadMatrices(xStage + j * kHalfPlane +
                                             halfOffset(row, step * kStepChunks + matrix % 2));
#pragma unroll
                for (int i = 0; i < kPlanesW; i++) {
                    multiply<kKind>(sums[i + j][2 * pair], w[i], x.x, x.y);
                    multiply<kKind>(sums[i + j][2 * pair + 1], w[i], x.z, x.w);
                }
            }
        }
    }
}

// kKind 0: bits, 1: bytes (one plane of each operand). kZero: tokens have zero points.
template <int kKind, int kPlanesW, int kPlanesX, int kStages, bool kZero>
__global__ void __launch_bounds__(kWarps * kWarpSize, 1)
    bipolarGemmMma(const uint8* __restrict__ xTiles, const uint8* __restrict__ wTiles,      // planes.cuh
                   const int* __restrict__ xSums, const int* __restrict__ wSums,            // [M], [N]
                   const float* __restrict__ xSteps, const uint16* __restrict__ wScales,    // [M] fp32, [N] fp16
                   const void* __restrict__ bias, void* __restrict__ y,                     // [N], [M, N] of dtype
                   int M, int N, int K, int actLimit, int weightLimit, int dtype) {
    const Widths widths{actLimit, weightLimit};
    constexpr int kLevels = kPlanesW + kPlanesX - 1;
    constexpr uint32 kStageBytes = (kPlanesW + kPlanesX) * kHalfPlane;
    extern __shared__ uint8 dynamicShared[];
    const uint32 base = sharedAddress(dynamicShared);
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int n0 = warp / 2 * 16, m0 = warp % 2 * kWarpTokens;
    constexpr int kTileDepth = kKind == 0 ? kBitsPerLine : kLineBytes;
    const int kTiles = (K + kTileDepth - 1) / kTileDepth, halves = 2 * kTiles;

    const auto copy = [&](int half) {
        if (half < halves) {
            const uint32 stage = base + half % kStages * kStageBytes;
            copyHalf<kPlanesW>(stage, wTiles, blockIdx.x, half / 2, kTiles, half % 2);
            copyHalf<kPlanesX>(stage + kPlanesW * kHalfPlane, xTiles, blockIdx.y, half / 2, kTiles, half % 2);
        }
        copyCommit();  // an empty group keeps the count
    };
#pragma unroll 1
    for (int half = 0; half < kStages - 1; half++) copy(half);

    int sums[kLevels][kTokenTiles][4] = {};
#pragma unroll 1
    for (int half = 0; half < halves; half++) {
        copyWait<kStages - 2>();
        __syncthreads();  // this stage is there for all warps, and all are done with the one copied to next
        copy(half + kStages - 1);
        multiplyStage<kKind, kPlanesW, kPlanesX, kLevels>(sums, base + half % kStages * kStageBytes, n0, m0,
                                                          lane);
    }
    copyWait<0>();

    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int tile = 0; tile < kTokenTiles; tile++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int n = featureOfRow(blockIdx.x * kBlockRows + n0 + g + 8 * (e / 2));
            const int m = blockIdx.y * kBlockRows + m0 + tile * 8 + 2 * t + e % 2;
            if (n >= N || m >= M) continue;
            int dot = 0;
#pragma unroll
            for (int level = 0; level < kLevels; level++) dot += sums[level][tile][e] << level;
            const float value = recovered(dot, tokenTerm(xSums[m], widths),
                                          featureTerm(wSums[n], featureWidths<kZero>(widths), K) *
                                              twiceZero<kZero>(xSums, m, M),
                                          xSteps[m],
                                          weightScale(wScales[n], widths),
                                          bias == nullptr ? 0.f : loadElement(bias, n, dtype));
            storeElement(y, size_t(m) * N + n, value, dtype);
        }
    }
}
