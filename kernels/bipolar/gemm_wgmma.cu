// bipolarGemmWgmma: y[M, N] = x W^T + bias for bipolar-INT operands on Hopper's warpgroup products (sm_90a).
//
// Formula and operand order: planes.cuh (Bipolar-INT sections 3.2, 4.1). A tile of y is [kConsumers * 64 rows of
// operand A] x [kRowsB rows of operand B]; A is x and B is W, or the other way round (kSwap). Every plane of A
// meets every plane of B in AND and popcount; pairs with equal i + j share one set of accumulators, so the paper's
// recovery happens in registers (4.2). Where A has one plane, one product covers all planes of B.
//
//   block = 1 producer warpgroup + kConsumers consumer warpgroups, each 64 rows of A; of the producer, one thread
//   copies the stages and three warps load the sums, scales and biases of the tile after the one in work
//   stage = one k tile of both operands; kStages of them in flight (the paper's ping-pong, 4.2 (3))
//   grid: persistent; tiles of A run fastest within groups, so the blocks in flight share operands in L2
//
// A product of n columns takes n / 2 clocks and reads 2 KiB + 32 n bytes of shared memory: wide products read less.
// Limits: K c_x c_w < 2^31, <= 2^22 for bits; kPlanesB * kRowsB <= 256 where A has one plane.
#include "epilogue.cuh"
#include "lines.cuh"

constexpr int kGroupTiles = 16;      // tiles of A per group of the tile order
constexpr int kSteps = kSwizzleBytes / kWgmmaDepthBytes;
constexpr int kSharedAlignment = QK_SHARED_ALIGNMENT;
constexpr int kLineThreads = kWarpgroup - kWarpSize;  // the producer's warps that copy no stages
constexpr int kLineSets = QK_LINE_SETS;               // lines of the tile in work and of the next
constexpr int kLinesBarrier = 3;                      // of the first set; 1 and 2 are the consumers'

struct Operand {
    const uint8* tiles;
    int rows;
};

template <ProductKind kKind, int kPlanesA, int kPlanesB, int kRowsB, int kConsumers>
struct Tile {
    static constexpr int kRowsA = kConsumers * kWgmmaRows;
    static constexpr int kLevels = kPlanesA + kPlanesB - 1;
    static constexpr int kAccumulators = kRowsB / 2;
    static constexpr bool kFused = kPlanesA == 1;
    static constexpr int kCopyRows = kRowsB < kBlockRows ? kRowsB : kBlockRows;
    static constexpr uint32 kBytesA = kPlanesA * kRowsA * kSwizzleBytes;
    static constexpr uint32 kBytesB = kPlanesB * kRowsB * kSwizzleBytes;
    static constexpr uint32 kStageBytes = kBytesA + kBytesB;
    static constexpr int kCopiesB = kPlanesB * kRowsB / kCopyRows;
};

template <bool kValue>
struct Constant {
    static constexpr bool value = kValue;
};

// Order of the tiles: kGroupTiles tiles of A against all of B, then the next group.
__device__ __forceinline__ void tileAt(int index, int tilesA, int tilesB, int& tileA, int& tileB) {
    const int group = index / (kGroupTiles * tilesB);
    const int within = index % (kGroupTiles * tilesB);
    const int height = min(kGroupTiles, tilesA - group * kGroupTiles);
    tileA = group * kGroupTiles + within % height;
    tileB = within / height;
}

// What one tile copies per stage, k tile after k tile: whole blocks of A, runs of rows of B plane by plane.
template <typename T, int kPlanesA, int kPlanesB>
struct TileCopies {
    static constexpr int kBlocksA = T::kRowsA / kBlockRows, kCopiesB = T::kCopiesB;
    static constexpr uint32 kStepB = kPlanesB * kPlaneBytes, kCopyBytesB = T::kCopyRows * kSwizzleBytes;
    const BlockCopies<kBlocksA, kPlanesA * kPlaneBytes> ofA;
    const uint8* sourceB[kCopiesB];

    __device__ __forceinline__ TileCopies(const Operand& a, const Operand& b, int tileA, int tileB, int kTiles)
        : ofA(a.tiles, tileA * kBlocksA, (a.rows - 1) / kBlockRows, kTiles) {
        constexpr int kCopiesPerPlane = kCopiesB / kPlanesB;
        const int lastB = (b.rows - 1) / kBlockRows;
#pragma unroll
        for (int c = 0; c < kCopiesB; c++) {
            const int plane = c / kCopiesPerPlane;
            const int row = (tileB * kCopiesPerPlane + c % kCopiesPerPlane) * T::kCopyRows;
            sourceB[c] = b.tiles + size_t(min(row / kBlockRows, lastB)) * kTiles * kStepB + plane * kPlaneBytes +
                         row % kBlockRows * kSwizzleBytes;
        }
    }
    __device__ __forceinline__ void start(uint32 stage, uint64* full, int kTile) const {
        barrierExpect(full, T::kStageBytes);
        ofA.start(stage, full, kTile);
#pragma unroll
        for (int c = 0; c < kCopiesB; c++) {
            copyBulk(stage + T::kBytesA + c * kCopyBytesB, sourceB[c] + kTile * kStepB, kCopyBytesB, full);
        }
    }
};

// All products of one stage: A's 64 rows of this warpgroup at addressA, B at addressB. kFirst: the sums start from zero
// by a constant, so that their registers are free between tiles.
template <typename T, ProductKind kKind, int kPlanesA, int kPlanesB, int kRowsB, bool kFirst>
__device__ __forceinline__ void multiplyStage(int* sums, uint32 addressA, uint32 addressB) {
    productFence();
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
#pragma unroll
        for (int j = 0; j < kPlanesA; j++) {
            const uint64 descA = operandDescriptor(addressA + j * kPlaneBytes + s * kWgmmaDepthBytes);
            if constexpr (T::kFused) {
                const uint64 descB = operandDescriptor(addressB + s * kWgmmaDepthBytes);
                WarpgroupProduct<kKind, kPlanesB * kRowsB>::add(sums, descA, descB, !(kFirst && s == 0));
            } else {
#pragma unroll
                for (int i = 0; i < kPlanesB; i++) {
                    const uint64 descB =
                        operandDescriptor(addressB + i * kRowsB * kSwizzleBytes + s * kWgmmaDepthBytes);
                    // Level i + j is first met with j = 0, or with the last plane of B.
                    const bool fresh = kFirst && s == 0 && (j == 0 || i == kPlanesB - 1);
                    WarpgroupProduct<kKind, kRowsB>::add(sums + (i + j) * T::kAccumulators, descA, descB, !fresh);
                }
            }
        }
    }
    productCommit();
}

// kKindValue: ProductKind, bytes have one plane. kSwap: A is W. kRowsB: rows of B in a tile. kZero: tokens have zero
// points.
template <int kKindValue, int kPlanesW, int kPlanesX, bool kSwap, int kRowsB, int kConsumers, int kStages,
          int kDtype, bool kZero>
__global__ void __launch_bounds__((kConsumers + 1) * kWarpgroup, 1)
    bipolarGemmWgmma(const uint8* __restrict__ xTiles, const uint8* __restrict__ wTiles,  // planes.cuh
                     const int* xSums, const int* __restrict__ wSums,  // [M], written until the wait; [N]: sums of codes
                     const float* xSteps, const uint16* __restrict__ wScales,  // [M] fp32, written until the wait; [N] fp16
                     const void* __restrict__ bias,                                       // [N] of kDtype, or null
                     uint8* __restrict__ y,                                               // [M, N] of kDtype
                     int M, int N, int K, int actLimit, int weightLimit,
                     int kTiles, int tilesA, int tilesB, int tiles) {  // of K, along A, along B, of y
    constexpr ProductKind kKind = static_cast<ProductKind>(kKindValue);
    constexpr int kPlanesA = kSwap ? kPlanesW : kPlanesX, kPlanesB = kSwap ? kPlanesX : kPlanesW;
    constexpr bool kSmall = kKind == kBinary;
    using T = Tile<kKind, kPlanesA, kPlanesB, kRowsB, kConsumers>;
    // Two consumers start with 65536 / 384 registers a thread; the producer hands most of its own over.
    constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
    static_assert(kConsumers == 1 || kConsumers == 2, "one or two consumer warpgroups");

    extern __shared__ uint8 dynamicShared[];
    __shared__ uint64 full[kStages], empty[kStages], linesFull[kLineSets];
    using Line = LineOf<kZero>;
    __shared__ Line lines[kLineSets][T::kRowsA + kRowsB];  // of A, of B
    __shared__ int2 corners[kLineSets];                     // first rows of A and B of the tile
    const uint32 base = (sharedAddress(dynamicShared) + kSharedAlignment - 1) & ~uint32(kSharedAlignment - 1);

    constexpr int kSlabBytes = slabBytes(kSwap, kDtype);
    uint8* slabs = dynamicShared + (base - sharedAddress(dynamicShared)) + kStages * T::kStageBytes;

    const LineProblem problem{xSums, wSums, xSteps, wScales, bias, M, N, K,
                              featureWidths<kZero>(Widths{actLimit, weightLimit}), kZero};
    const Operand a{kSwap ? wTiles : xTiles, kSwap ? N : M}, b{kSwap ? xTiles : wTiles, kSwap ? M : N};

    const int warpgroup = threadIdx.x / kWarpgroup, thread = threadIdx.x % kWarpgroup;
    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; s++) {
            barrierInit(&full[s], 1);
            barrierInit(&empty[s], kConsumers);
        }
        for (int set = 0; set < kLineSets; set++) barrierInit(&linesFull[set], kLineThreads);
        barrierInitFence();
    }
    __syncthreads();
    allowNextKernel();
    waitForPriorKernels();  // from here on operands may be read and y written

    int stage = 0;
    uint32 parity = 0;
    const auto advance = [&] {
        if (++stage == kStages) {
            stage = 0;
            parity ^= 1;
        }
    };
    int begun = 0;  // tiles that this block has begun
    const auto lineSet = [&] { return begun % kLineSets; };
    constexpr int kLineUsers = kLineThreads + kConsumers * kWarpgroup;
    if (warpgroup == 0) {
        if constexpr (kConsumers == 2) giveRegisters<kProducerRegisters>();
        if (thread < kWarpSize) {
            if (!electLane()) return;
            for (int index = blockIdx.x; index < tiles; index += blockCount()) {
                int tileA, tileB;
                tileAt(index, tilesA, tilesB, tileA, tileB);
                const TileCopies<T, kPlanesA, kPlanesB> copies(a, b, tileA, tileB, kTiles);
                for (int k = 0; k < kTiles; k++, advance()) {
                    barrierWait(&empty[stage], parity ^ 1);
                    copies.start(base + stage * T::kStageBytes, &full[stage], k);
                }
            }
        } else {
            for (int index = blockIdx.x; index < tiles; index += blockCount(), begun++) {
                int tileA, tileB;
                tileAt(index, tilesA, tilesB, tileA, tileB);
                // Asleep: there is nothing to poll for as long as a tile lasts.
                if (begun >= kLineSets) namedSync(kLinesBarrier + lineSet(), kLineUsers);
                Line* const ofA = lines[lineSet()];
                Line* const ofB = ofA + T::kRowsA;
                const int firstA = tileA * T::kRowsA, firstB = tileB * kRowsB;
                if (thread == kWarpSize) corners[lineSet()] = make_int2(firstA, firstB);
                loadLines<kSmall, kSwap ? kRowsB : T::kRowsA, kSwap ? T::kRowsA : kRowsB, kLineThreads, kZero>(
                    problem, kSwap ? ofB : ofA, kSwap ? ofA : ofB, kSwap ? firstB : firstA, kSwap ? firstA : firstB,
                    thread - kWarpSize, kDtype);
                barrierArrive(&linesFull[lineSet()]);
            }
        }
    } else {
        if constexpr (kConsumers == 2) takeRegisters<kConsumerRegisters>();
        const int consumer = warpgroup - 1, barrier = warpgroup;
        const auto releaseBefore = [&] {  // the stage before this one
            if (thread == 0) barrierArrive(&empty[stage == 0 ? kStages - 1 : stage - 1]);
        };
        for (int index = blockIdx.x; index < tiles; index += blockCount(), begun++) {
            int sums[T::kLevels * T::kAccumulators];
            const auto multiply = [&](auto first) {
                barrierWait(&full[stage], parity);
                const uint32 address = base + stage * T::kStageBytes;
                multiplyStage<T, kKind, kPlanesA, kPlanesB, kRowsB, decltype(first)::value>(
                    sums, address + consumer * kPlanesA * kPlaneBytes, address + T::kBytesA);
            };
            multiply(Constant<true>{});
            advance();
            for (int k = 1; k < kTiles; k++, advance()) {
                multiply(Constant<false>{});
                productWait<1>();
                releaseBefore();
            }
            productWait<0>();
            releaseBefore();
            mergeLevels<T::kLevels, T::kAccumulators>(sums);
            const Line* const linesA = lines[lineSet()] + consumer * kWgmmaRows;
            const Line* const linesB = lines[lineSet()] + T::kRowsA;
            barrierWait(&linesFull[lineSet()], begun / kLineSets % 2);
            const int firstA = corners[lineSet()].x + consumer * kWgmmaRows, firstB = corners[lineSet()].y;
            const Place place{y, kSwap ? firstB : firstA, kSwap ? firstA : firstB, M, N};
            if constexpr (kSwap) {
                uint8* slab = slabs + consumer * kSlabBytes;
                writeSlabs<kSmall, kRowsB, kDtype, kZero>(sums, linesA, linesB, place, slab, thread, barrier);
            } else {
                if (kDtype != kFloat32 && N % kRunFeatures == 0) {
                    writeRuns<kDtype != kFloat32, kSmall, kRowsB, kDtype, kZero>(sums, linesA, linesB, place, thread);
                } else {
                    writeRuns<false, kSmall, kRowsB, kDtype, kZero>(sums, linesA, linesB, place, thread);
                }
            }
            if (index + kLineSets * blockCount() < tiles) namedArrive(kLinesBarrier + lineSet(), kLineUsers);
        }
    }
}
