// bipolarGemmWgmma: y[M, N] = x W^T + bias for bipolar-INT operands on Hopper's warpgroup products (sm_90a).
//
// Formula and operand order: bipolar.cuh (Bipolar-INT sections 3.2, 4.1). A tile of y is [kConsumers * 64 rows of
// operand A] x [kColumns rows of operand B]; A is x and B is W, or the other way round (kSwap). Every plane of A
// meets every plane of B in AND and popcount; pairs with equal i + j share one set of accumulators, so the paper's
// recovery happens in registers (4.2). Where A has one plane, one product covers all planes of B.
//
//   block = 1 producer warpgroup + kConsumers consumer warpgroups, each 64 rows of A
//   stage = one k tile of both operands; kStages of them in flight (the paper's ping-pong, 4.2 (3))
//   cluster of kCluster blocks: neighbouring tiles of A against the same tile of B, which each block copies a part
//   of into all of them
//   grid: persistent; tiles of A run fastest within groups, so the blocks in flight share operands in L2
//
// Bytes per 1024 clocks decide: a product of n columns takes n / 2 clocks and reads 2 KiB + 32 n bytes of shared memory.
// Limits: K c_x c_w < 2^31; kPlanesB * kColumns <= 256 where A has one plane.
#include "bipolar.cuh"
#include "wgmma.cuh"

constexpr int kGroupTiles = 16;      // tiles of A per group of the tile order
constexpr int kSteps = kSwizzleBytes / kWgmmaDepthBytes;
constexpr int kSlabColumns = 64;     // columns of y written at once
constexpr int kStagePadding = 16;    // bytes between rows of a slab: no bank conflicts
constexpr int kSharedAlignment = 1024;

// What the epilogue needs to know of one row of an operand.
struct Line {
    int term;
    float scale;
    float bias;
};

struct Operand {
    const uint8* tiles;
    int rows;
};

template <ProductKind kKind, int kPlanesA, int kPlanesB, int kColumns, int kConsumers>
struct Tile {
    static constexpr int kRows = kConsumers * kWgmmaRows;
    static constexpr int kLevels = kPlanesA + kPlanesB - 1;
    static constexpr int kAccumulators = kColumns / 2;
    static constexpr bool kFused = kPlanesA == 1;
    static constexpr int kCopyRows = kColumns < kBlockRows ? kColumns : kBlockRows;
    static constexpr uint32 kBytesA = kPlanesA * kRows * kSwizzleBytes;
    static constexpr uint32 kBytesB = kPlanesB * kColumns * kSwizzleBytes;
    static constexpr uint32 kStageBytes = kBytesA + kBytesB;
    static constexpr int kCopiesB = kPlanesB * kColumns / kCopyRows;
};

// Order of the tiles: kGroupTiles tiles of A against all of B, then the next group.
__device__ __forceinline__ void tileAt(int index, int tilesA, int tilesB, int& tileA, int& tileB) {
    const int group = index / (kGroupTiles * tilesB);
    const int within = index % (kGroupTiles * tilesB);
    const int height = min(kGroupTiles, tilesA - group * kGroupTiles);
    tileA = group * kGroupTiles + within % height;
    tileB = within / height;
}

template <typename T, int kCluster>
__device__ __forceinline__ void copyStage(uint32 stage, uint64* full, const Operand& a, const Operand& b, int planesA,
                                          int planesB, int tileA, int tileB, int kTile, int kTiles, uint32 rank) {
    constexpr int kColumns = T::kBytesB / kSwizzleBytes;  // rows of B times planes
    const int blocksA = (a.rows + kBlockRows - 1) / kBlockRows, blocksB = (b.rows + kBlockRows - 1) / kBlockRows;
    barrierExpect(full, T::kStageBytes);
#pragma unroll 1  // 40 registers are all the producer has
    for (int c = 0; c < T::kRows / kBlockRows; c++) {
        const int block = min(tileA * (T::kRows / kBlockRows) + c, blocksA - 1);
        const uint32 bytes = planesA * kPlaneBytes;
        copyBulk(stage + c * bytes, a.tiles + (size_t(block) * kTiles + kTile) * bytes, bytes, full);
    }
    constexpr uint32 kBytes = T::kCopyRows * kSwizzleBytes;
    const int copiesPerPlane = T::kCopiesB / planesB;
#pragma unroll 1  // 40 registers are all the producer has
    for (int c = 0; c < T::kCopiesB; c++) {
        if (kCluster > 1 && c % kCluster != rank) continue;
        const int plane = c / copiesPerPlane, row = (tileB * copiesPerPlane + c % copiesPerPlane) * T::kCopyRows;
        const int block = min(row / kBlockRows, blocksB - 1);
        const uint8* source = b.tiles + ((size_t(block) * kTiles + kTile) * planesB + plane) * kPlaneBytes +
                              (row % kBlockRows) * kSwizzleBytes;
        const uint32 target = stage + T::kBytesA + c * kBytes;
        if (kCluster > 1) {
            copyBulkMulticast(target, source, kBytes, full, (1 << kCluster) - 1);
        } else {
            copyBulk(target, source, kBytes, full);
        }
    }
    static_assert(kColumns * kSwizzleBytes == T::kCopiesB * kBytes, "copies cover the tile of B");
    static_assert(T::kCopiesB % kCluster == 0, "the blocks of a cluster copy equal parts");
}

// All products of one stage: A's 64 rows of this warpgroup at addressA, B at addressB.
template <typename T, ProductKind kKind, int kPlanesA, int kPlanesB, int kColumns>
__device__ __forceinline__ void multiplyStage(int* sums, uint32 addressA, uint32 addressB, bool first) {
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
#pragma unroll
        for (int j = 0; j < kPlanesA; j++) {
            const uint64 descA = operandDescriptor(addressA + j * kPlaneBytes + s * kWgmmaDepthBytes);
            if constexpr (T::kFused) {
                const uint64 descB = operandDescriptor(addressB + s * kWgmmaDepthBytes);
                WarpgroupProduct<kKind, kPlanesB * kColumns>::add(sums, descA, descB, !(first && s == 0));
            } else {
#pragma unroll
                for (int i = 0; i < kPlanesB; i++) {
                    const uint64 descB =
                        operandDescriptor(addressB + i * kColumns * kSwizzleBytes + s * kWgmmaDepthBytes);
                    // Level i + j is first met with j = 0, or with the last plane of B.
                    const bool fresh = first && s == 0 && (j == 0 || i == kPlanesB - 1);
                    WarpgroupProduct<kKind, kColumns>::add(sums + (i + j) * T::kAccumulators, descA, descB, !fresh);
                }
            }
        }
    }
}

// Copy one finished slab [64 tokens, kSlabColumns channels] of this warpgroup to y, 16 bytes a thread where it fits.
template <int kElement>
__device__ __forceinline__ void storeSlab(const uint8* slab, uint8* y, int token0, int channel0, int slabTokens,
                                          int slabChannels, int M, int N, int thread) {
    constexpr int kPerChunk = kChunkBytes / kElement;
    constexpr int kRowBytes = kSlabColumns * kElement + kStagePadding;
    const int chunksPerRow = slabChannels / kPerChunk;
    const bool aligned = N % kPerChunk == 0;
    for (int c = thread; c < slabTokens * chunksPerRow; c += kWarpgroup) {
        const int token = token0 + c / chunksPerRow, channel = channel0 + c % chunksPerRow * kPerChunk;
        if (token >= M || channel >= N) continue;
        const uint8* from = slab + c / chunksPerRow * kRowBytes + c % chunksPerRow * kChunkBytes;
        uint8* to = y + (size_t(token) * N + channel) * kElement;
        if (aligned) {  // then channel + kPerChunk <= N
            *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
        } else {
            for (int e = 0; e < min(kPerChunk, N - channel) * kElement; e += 2) {
                *reinterpret_cast<uint16*>(to + e) = *reinterpret_cast<const uint16*>(from + e);
            }
        }
    }
}

// Recover the tile of this warpgroup from its accumulators and write it to y, a slab of 64 rows of B at a time.
template <typename T, int kColumns, bool kSwap, int kDtype>
__device__ __forceinline__ void writeTile(const int* sums, const Line* linesA, const Line* linesB, uint8* slab,
                                          uint8* y, int firstA, int firstB, int M, int N, int thread, int barrier) {
    constexpr int kElement = kDtype == kFloat32 ? 4 : 2;
    constexpr int kRowBytes = kSlabColumns * kElement + kStagePadding;
    constexpr int kWidth = kColumns < kSlabColumns ? kColumns : kSlabColumns;
    const int warp = thread / kWarpSize, g = thread % kWarpSize / 4, t = thread % 4;
#pragma unroll
    for (int start = 0; start < kColumns; start += kWidth) {
        namedSync(barrier, kWarpgroup);  // the lines are there and the slab is free
#pragma unroll
        for (int c = 0; c < kWidth / 8; c++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const int rowA = warp * 16 + g + 8 * (e / 2), rowB = c * 8 + 2 * t + e % 2;
                int dot = 0;
#pragma unroll
                for (int level = 0; level < T::kLevels; level++) {
                    dot += sums[level * T::kAccumulators + (start / 8 + c) * 4 + e] << level;
                }
                const Line a = linesA[rowA], b = linesB[start + rowB];
                const float value = recovered(dot, a.term, b.term, a.scale, b.scale, kSwap ? a.bias : b.bias);
                const int token = kSwap ? rowB : rowA, channel = kSwap ? rowA : rowB;
                storeElement(slab + token * kRowBytes, channel, value, kDtype);
            }
        }
        namedSync(barrier, kWarpgroup);
        storeSlab<kElement>(slab, y, kSwap ? firstB + start : firstA, kSwap ? firstA : firstB + start,
                            kSwap ? kWidth : kWgmmaRows, kSwap ? kWgmmaRows : kWidth, M, N, thread);
    }
}

struct Problem {
    const int* xSums;
    const int* wSums;
    const float* xSteps;
    const uint16* wScales;
    const void* bias;
    int M, N, K;
    Widths widths;
};

template <int kDtype>
__device__ __forceinline__ Line lineOf(const Problem& p, bool isToken, int row) {
    if (isToken) {
        if (row >= p.M) return Line{0, 0.f, 0.f};
        return Line{tokenTerm(p.xSums[row], p.widths), p.xSteps[row], 0.f};
    }
    if (row >= p.N) return Line{0, 0.f, 0.f};
    return Line{channelTerm(p.wSums[row], p.widths, p.K), halfToFloat(p.wScales[row]),
                p.bias == nullptr ? 0.f : loadElement(p.bias, row, kDtype)};
}

// kKindValue: ProductKind, bytes have one plane. kSwap: A is W. kColumns: rows of B in a tile.
template <int kKindValue, int kPlanesW, int kPlanesX, bool kSwap, int kColumns, int kConsumers, int kStages,
          int kCluster, int kDtype>
__global__ void __launch_bounds__((kConsumers + 1) * kWarpgroup, 1) __cluster_dims__(kCluster, 1, 1)
    bipolarGemmWgmma(const uint8* __restrict__ xTiles, const uint8* __restrict__ wTiles,  // bipolar.cuh
                     const int* __restrict__ xSums, const int* __restrict__ wSums,        // [M], [N] sums of codes
                     const float* __restrict__ xSteps, const uint16* __restrict__ wScales,  // [M] fp32, [N] fp16
                     const void* __restrict__ bias,                                       // [N] of kDtype, or null
                     uint8* __restrict__ y,                                               // [M, N] of kDtype
                     int M, int N, int K, int actLimit, int weightLimit) {
    constexpr ProductKind kKind = static_cast<ProductKind>(kKindValue);
    constexpr int kPlanesA = kSwap ? kPlanesW : kPlanesX, kPlanesB = kSwap ? kPlanesX : kPlanesW;
    using T = Tile<kKind, kPlanesA, kPlanesB, kColumns, kConsumers>;
    constexpr int kElement = kDtype == kFloat32 ? 4 : 2;
    constexpr int kSlabBytes = kWgmmaRows * (kSlabColumns * kElement + kStagePadding);
    // Two consumers start with 65536 / 384 registers a thread; the producer hands most of its own over.
    constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
    static_assert(kConsumers == 1 || kConsumers == 2, "one or two consumer warpgroups");

    extern __shared__ uint8 dynamicShared[];
    __shared__ uint64 full[kStages], empty[kStages];
    __shared__ Line linesA[kConsumers][kWgmmaRows], linesB[kConsumers][kColumns];
    const uint32 base = (sharedAddress(dynamicShared) + kSharedAlignment - 1) & ~uint32(kSharedAlignment - 1);
    uint8* slabs = dynamicShared + (base - sharedAddress(dynamicShared)) + kStages * T::kStageBytes;

    const Problem problem{xSums, wSums, xSteps, wScales, bias, M, N, K, Widths{actLimit, weightLimit}};
    const Operand a{kSwap ? wTiles : xTiles, kSwap ? N : M}, b{kSwap ? xTiles : wTiles, kSwap ? M : N};
    constexpr int kTileDepth = kKind == kBinary ? kBitsPerLine : kLineBytes;
    const int kTiles = (K + kTileDepth - 1) / kTileDepth;
    // A cluster works on kCluster neighbouring tiles of A; those behind the last compute what nobody stores.
    const int clustersA = (a.rows + kCluster * T::kRows - 1) / (kCluster * T::kRows);
    const int tilesB = (b.rows + kColumns - 1) / kColumns;
    const uint32 rank = kCluster > 1 ? clusterRank() : 0;
    const int firstTile = blockIdx.x / kCluster, tileStep = gridDim.x / kCluster;

    const int warpgroup = threadIdx.x / kWarpgroup, thread = threadIdx.x % kWarpgroup;
    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; s++) {
            barrierInit(&full[s], 1);
            barrierInit(&empty[s], kConsumers * kCluster);
        }
        barrierInitFence();
    }
    __syncthreads();
    if constexpr (kCluster > 1) clusterSync();

    int stage = 0;
    uint32 parity = 0;
    const auto advance = [&] {
        if (++stage == kStages) {
            stage = 0;
            parity ^= 1;
        }
    };
    if (warpgroup == 0) {
        if constexpr (kConsumers == 2) giveRegisters<kProducerRegisters>();
        if (thread == 0) {
            for (int index = firstTile; index < clustersA * tilesB; index += tileStep) {
                int tileA, tileB;
                tileAt(index, clustersA, tilesB, tileA, tileB);
                for (int k = 0; k < kTiles; k++, advance()) {
                    barrierWait(&empty[stage], parity ^ 1);
                    copyStage<T, kCluster>(base + stage * T::kStageBytes, &full[stage], a, b, kPlanesA, kPlanesB,
                                           tileA * kCluster + rank, tileB, k, kTiles, rank);
                }
            }
        }
    } else {
        if constexpr (kConsumers == 2) takeRegisters<kConsumerRegisters>();
        const int consumer = warpgroup - 1, barrier = warpgroup;
        const auto release = [&](int s) {
            if (thread < kCluster) barrierArriveAt(&empty[s], thread);
        };
        for (int index = firstTile; index < clustersA * tilesB; index += tileStep) {
            int tileA, tileB;
            tileAt(index, clustersA, tilesB, tileA, tileB);
            const int firstA = ((tileA * kCluster + rank) * kConsumers + consumer) * kWgmmaRows;
            const int firstB = tileB * kColumns;
            if (thread < kWgmmaRows) {
                linesA[consumer][thread] = lineOf<kDtype>(problem, !kSwap, firstA + thread);
            }
            for (int i = thread; i < kColumns; i += kWarpgroup) {
                linesB[consumer][i] = lineOf<kDtype>(problem, kSwap, firstB + i);
            }
            int sums[T::kLevels * T::kAccumulators];
            int previous = -1;
            for (int k = 0; k < kTiles; k++, advance()) {
                barrierWait(&full[stage], parity);
                const uint32 address = base + stage * T::kStageBytes;
                productFence();
                multiplyStage<T, kKind, kPlanesA, kPlanesB, kColumns>(
                    sums, address + consumer * kPlanesA * kPlaneBytes, address + T::kBytesA, k == 0);
                productCommit();
                productWait<1>();
                if (previous >= 0) release(previous);
                previous = stage;
            }
            productWait<0>();
            release(previous);
            writeTile<T, kColumns, kSwap, kDtype>(sums, linesA[consumer], linesB[consumer],
                                                  slabs + consumer * kSlabBytes, y, firstA, firstB, M, N, thread,
                                                  barrier);
            namedSync(barrier, kWarpgroup);  // all have read the lines and the slab
        }
    }
    // A block must outlive the copies and arrivals that the others of its cluster send it.
    if constexpr (kCluster > 1) clusterSync();
}
