// int8GemmMma: y[M, N] = actScale * weightScale * (x W^T) + bias for INT8 or INT4 codes with warp-level products, on
// GPUs from sm_80 on (kBits 4: native on sm_80, sm_86 and sm_89). kRequantize: instead of y, the codes of activation(y)
// for the next Linear (int8_requantize.cuh).
//
// A block makes 128 rows of x against 128 rows of W; of its 8 warps, warp w has rows 64 (w / 4) .. of x and
// 32 (w % 4) .. of W. A stage is one line (128 bytes: 128 or 256 columns) of every row of both operands, copied as it
// stands in the tiles (planes.cuh), whose swizzle lets 8 rows of a matrix load touch 8 different 16-byte bank groups.
// kStages stages, 32 KiB each, are in flight: three fit the 99 KiB of a block on sm_86 and sm_89.
//
// Integer sums in a fixed order: results repeat bit for bit.
#include "int8_requantize.cuh"
#include "../shared/mma.cuh"

constexpr int kWarps = QK_MMA_WARPS;
constexpr int kTileBlocks = QK_MMA_TILE_ROWS / kBlockRows;  // blocks of 64 rows per operand of a tile
constexpr int kTileRows = kTileBlocks * kBlockRows;
constexpr int kOperandBytes = kTileBlocks * kPlaneBytes;
constexpr int kStepChunks = 2;                      // 16-byte chunks per product
constexpr int kWarpRows = 64, kWarpFeatures = 32;
constexpr int kRowTiles = kWarpRows / 16, kFeatureTiles = kWarpFeatures / 8;

// D = C + A B on signed bytes, 16 x 32 by 32 x 8, or signed nibbles, 16 x 64 by 64 x 8: a register holds 4 neighbouring
// bytes either way. Lane 4 g + t: a.x row g, a.y row g + 8, bytes 4 t ..; a.z, a.w the same rows 16 bytes further;
// b0, b1 column g likewise; c[0], c[1] row g, columns 2 t, 2 t + 1; c[2], c[3] row g + 8.
template <int kBits>
__device__ __forceinline__ void signedMma(int (&c)[4], uint4 a, uint32 b0, uint32 b1) {
    if constexpr (kBits == 8) {
        asm volatile(
            "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
            : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
    } else {
        asm volatile(
            "mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
            : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
    }
}

// Start copying one k tile of two blocks of 64 rows; behind the last block, that one again.
__device__ __forceinline__ void copyOperand(uint32 shared, const uint8* tiles, int first, int blocks, int kTile,
                                            int kTiles) {
#pragma unroll
    for (int b = 0; b < kTileBlocks; b++) {
        const size_t block = min(first + b, blocks - 1);
        const uint8* from = tiles + (block * kTiles + kTile) * kPlaneBytes;
        for (int i = threadIdx.x * kChunkBytes; i < kPlaneBytes; i += kWarps * kWarpSize * kChunkBytes) {
            copyAsync16(shared + b * kPlaneBytes + i, from + i);
        }
    }
}

__device__ __forceinline__ uint4 loadChunk(uint32 operand, int row, int chunk) {
    return loadMatrices(operand + row * kLineBytes + chunkOffset(chunk, row));
}

template <int kBits>
__device__ __forceinline__ void multiplyStage(int (&sums)[kRowTiles][kFeatureTiles][4], uint32 stage, int m0,
                                              int n0, int lane) {
    const int matrix = lane / 8, inMatrix = lane % 8;
#pragma unroll
    for (int step = 0; step < kChunksPerLine / kStepChunks; step++) {
        uint4 w[kFeatureTiles / 2];
#pragma unroll
        for (int pair = 0; pair < kFeatureTiles / 2; pair++) {
            w[pair] = loadChunk(stage + kOperandBytes, n0 + pair * 16 + inMatrix + 8 * (matrix / 2),
                                step * kStepChunks + matrix % 2);
        }
#pragma unroll
        for (int tile = 0; tile < kRowTiles; tile++) {
            const uint4 x = loadChunk(stage, m0 + tile * 16 + inMatrix + 8 * (matrix % 2),
                                      step * kStepChunks + matrix / 2);
#pragma unroll
            for (int pair = 0; pair < kFeatureTiles / 2; pair++) {
                signedMma<kBits>(sums[tile][2 * pair], x, w[pair].x, w[pair].y);
                signedMma<kBits>(sums[tile][2 * pair + 1], x, w[pair].z, w[pair].w);
            }
        }
    }
}

// A warp's 64 rows x 32 features as codes of the next Linear, 16 rows at a time. The loop is not unrolled, so that its
// body stands in the code once; the sums are picked by comparison, as registers have no index.
template <int kDtype>
__device__ __forceinline__ void requantizeWarp(const int (&sums)[kRowTiles][kFeatureTiles][4], const Output& out,
                                               const Following& next, const float (&scale)[kRunFeatures],
                                               const float (&bias)[kRunFeatures], float* scratch, int m, int n,
                                               int lane) {
    if (n >= out.N) return;
    float factor[kRunFeatures];
#pragma unroll
    for (int i = 0; i < kRunFeatures; i++) factor[i] = factorOf(next, n + lane % 4 * kRunFeatures + i, out.N);
    const int* starts = next.slotStarts + n / kRunRows;
    const LaneSlots slots = laneSlots(next, starts[0], starts[1], lane);
#pragma unroll 1
    for (int tile = 0; tile < kRowTiles && m + tile * kGroupRows < out.M; tile++) {
        uint32 word[kRunFeatures];
#pragma unroll
        for (int t = 0; t < kRowTiles; t++) {
            if (t == tile) roundRun<kDtype>(&sums[t][0][0], scale, bias, word);
        }
        requantizeRun<kDtype>(word, next, slots, factor, scratch, m + tile * kGroupRows, n, out.M, out.N,
                              lane);
    }
}

template <int kBits, int kStages, int kDtype, bool kRequantize>
__global__ void __launch_bounds__(kWarps * kWarpSize, 1)
    int8GemmMma(const uint8* __restrict__ xTiles, const uint8* __restrict__ wTiles,        // planes.cuh
                const float* __restrict__ actScale, const float* __restrict__ weightScale,  // [1]; [1] or [N]
                const void* __restrict__ bias, uint8* __restrict__ y,  // [N] or null; [M, N], or codes
                const float* __restrict__ multiplier, const int* __restrict__ slots,        // of the next Linear
                const int* __restrict__ slotStarts, int perChannel, int slotCount, int top, int activation,
                int rowScales,  // whether weightScale is [N]
                int biasDtype, int M, int N, int kTiles) {
    constexpr uint32 kStageBytes = 2 * kOperandBytes;
    extern __shared__ __align__(1024) uint8 dynamicShared[];
    const uint32 base = sharedAddress(dynamicShared);
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int m0 = warp / 4 * kWarpRows, n0 = warp % 4 * kWarpFeatures;
    const int blocksX = (M + kBlockRows - 1) / kBlockRows, blocksW = (N + kBlockRows - 1) / kBlockRows;

    const auto copy = [&](int k) {
        if (k < kTiles) {
            const uint32 stage = base + k % kStages * kStageBytes;
            copyOperand(stage, xTiles, blockIdx.y * kTileBlocks, blocksX, k, kTiles);
            copyOperand(stage + kOperandBytes, wTiles, blockIdx.x * kTileBlocks, blocksW, k, kTiles);
        }
        copyCommit();  // an empty group keeps the count
    };
#pragma unroll 1
    for (int k = 0; k < kStages - 1; k++) copy(k);

    int sums[kRowTiles][kFeatureTiles][4] = {};
#pragma unroll 1
    for (int k = 0; k < kTiles; k++) {
        copyWait<kStages - 2>();
        __syncthreads();  // this stage is there for all warps, and all are done with the one copied to next
        copy(k + kStages - 1);
        multiplyStage<kBits>(sums, base + k % kStages * kStageBytes, m0, n0, lane);
    }
    copyWait<0>();

    const Output out{y, M, N};
    const Scales scales{*actScale, weightScale, rowScales};
    const int m = blockIdx.y * kTileRows + m0, n = blockIdx.x * kTileRows + n0;
    const int first = n + lane % 4 * kRunFeatures;
    const bool whole = isWhole(out, m, kWarpRows, n, kWarpFeatures);
    float runScale[kRunFeatures], runBias[kRunFeatures];
#pragma unroll
    for (int i = 0; i < kRunFeatures; i++) {
        runScale[i] = scaleOf(scales, first + i, N);
        runBias[i] = biasOf(bias, biasDtype, first + i, N);
    }
    if constexpr (kRequantize) {
        static_assert(kWarps * kScratchFloats * 4 <= int(kStageBytes), "scratch takes the place of a stage");
        __syncthreads();  // all products have read their operands
        const Following next{y, multiplier, slots, slotStarts, perChannel, slotCount, top, activation};
        float* scratch = reinterpret_cast<float*>(dynamicShared) + warp * kScratchFloats;
        requantizeWarp<kDtype>(sums, out, next, runScale, runBias, scratch, m, n, lane);
    } else {
#pragma unroll
        for (int tile = 0; tile < kRowTiles; tile++) {
            const int row = m + tile * kGroupRows + lane / 4;
            if (whole) {
                writeRun<true, kDtype>(&sums[tile][0][0], out, runScale, runBias, row, first);
            } else {
                writeRun<false, kDtype>(&sums[tile][0][0], out, runScale, runBias, row, first);
            }
        }
    }
}
