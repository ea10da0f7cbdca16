// int8GemmWgmma: y[M, N] = actScale * weightScale * (x W^T) + bias for INT8 codes, on Hopper's warpgroup products
// (sm_90a). kRequantize: instead of y, the codes of activation(y) for the next Linear (int8_requantize.cuh).
//
// Operands stand in tiles of 64 rows x 128 columns in the order of the products' shared memory (planes.cuh), so a tile
// is one bulk copy and no tensor map is needed. Sums are exact int32 (FlattenQuant 4.1: scales come last).
//
//   block = 1 producer warpgroup + kConsumers consumer warpgroups, each 64 rows of x against kTileN rows of W
//   stage = one k tile of both operands; kStages of them in flight
//   grid: persistent; tiles of x run fastest within groups, so the blocks in flight share operands in L2
//
// Tiles that reach behind the last block of an operand copy that block again; what comes of it is not written.
// Any M, N and K; integer sums in a fixed order repeat bit for bit.
#include "int8_requantize.cuh"
#include "../shared/wgmma.cuh"

constexpr int kGroupTiles = 16;  // tiles of x per group of the tile order
constexpr int kSteps = kSwizzleBytes / kWgmmaDepthBytes;
constexpr int kSharedAlignment = QK_SHARED_ALIGNMENT;

constexpr ProductKind kSignedBytes = static_cast<ProductKind>(2);
#define WG_SIGNED(columns, regs, a, b, k) \
    WG_PRODUCT(kSignedBytes, columns, "m64n" #columns "k32", ".s32.s8.s8", regs, a, b, k)
WG_SIGNED(64, 32, 32, 33, 34)
WG_SIGNED(128, 64, 64, 65, 66)
WG_SIGNED(256, 128, 128, 129, 130)

template <bool kValue>
struct Constant {
    static constexpr bool value = kValue;
};

// Tile ``index`` in the order: kGroupTiles tiles of x against all of W, then the next group.
__device__ __forceinline__ void tileAt(int index, int tilesX, int tilesW, int& tileX, int& tileW) {
    const int group = index / (kGroupTiles * tilesW), within = index % (kGroupTiles * tilesW);
    const int height = min(kGroupTiles, tilesX - group * kGroupTiles);
    tileX = group * kGroupTiles + within % height;
    tileW = within / height;
}

// All products of one stage. kFirst: the sums start from zero by a constant, so their registers are free between tiles.
template <int kTileN, bool kFirst>
__device__ __forceinline__ void multiplyStage(int* sums, uint32 addressX, uint32 addressW) {
    productFence();
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
        WarpgroupProduct<kSignedBytes, kTileN>::add(sums, operandDescriptor(addressX + s * kWgmmaDepthBytes),
                                                      operandDescriptor(addressW + s * kWgmmaDepthBytes),
                                                      !(kFirst && s == 0));
    }
    productCommit();
}

// Eight neighbours in shared memory, aligned to 16 bytes.
__device__ __forceinline__ void loadRun(const float* from, float (&to)[kRunFeatures]) {
    const float4 low = reinterpret_cast<const float4*>(from)[0], high = reinterpret_cast<const float4*>(from)[1];
    const float all[kRunFeatures] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < kRunFeatures; i++) to[i] = all[i];
}

// One consumer's 64 rows; scales, biases: of the tile's features, in shared memory.
template <bool kWhole, int kTileN, int kDtype>
__device__ __forceinline__ void writeTile(const int* sums, const Output& out, const float* scales,
                                          const float* biases, int m, int n, int thread) {
    const int lane = thread % kWarpSize, row = m + thread / kWarpSize * 16 + lane / 4;
#pragma unroll
    for (int start = 0; start < kTileN; start += kRunRows) {
        const int first = start + lane % 4 * kRunFeatures;
        float scale[kRunFeatures], bias[kRunFeatures];
        loadRun(scales + first, scale);
        loadRun(biases + first, bias);
        writeRun<kWhole, kDtype>(sums + start / kRunRows * kRunDots, out, scale, bias, row, n + first);
    }
}

// One consumer's 64 rows as codes of the next Linear, 32 features at a time; scales, biases, factors: of the tile's
// features. The loop is not unrolled, so that its body stands in the code once; the sums are picked by comparison, as
// registers have no index.
template <int kTileN, int kDtype>
__device__ __forceinline__ void requantizeTile(const int* sums, const Output& out, const Following& next,
                                               const float* scales, const float* biases, const float* factors,
                                               float* scratch, int m, int n, int thread) {
    const int lane = thread % kWarpSize, firstM = m + thread / kWarpSize * kGroupRows;
    if (firstM >= out.M) return;
    const int runs = min(kTileN, out.N - n + kRunRows - 1) / kRunRows;
    const int* starts = next.slotStarts + n / kRunRows;
    int slotFirst = starts[0], slotEnd = starts[1];
#pragma unroll 1
    for (int run = 0; run < runs; run++) {
        const LaneSlots slots = laneSlots(next, slotFirst, slotEnd, lane);
        slotFirst = slotEnd;
        slotEnd = starts[min(run + 2, runs)];
        const int first = run * kRunRows + lane % 4 * kRunFeatures;
        float scale[kRunFeatures], bias[kRunFeatures], factor[kRunFeatures];
        loadRun(scales + first, scale);
        loadRun(biases + first, bias);
        loadRun(factors + first, factor);
        uint32 word[kRunFeatures];
#pragma unroll
        for (int r = 0; r < kTileN / kRunRows; r++) {
            if (r == run) roundRun<kDtype>(sums + r * kRunDots, scale, bias, word);
        }
        requantizeRun<kDtype>(word, next, slots, factor, scratch, firstM, n + run * kRunRows, out.M, out.N,
                              lane);
    }
}

template <int kTileN, int kConsumers, int kStages, int kDtype, bool kRequantize>
__global__ void __launch_bounds__((kConsumers + 1) * kWarpgroup, 1)
    int8GemmWgmma(const uint8* __restrict__ xTiles, const uint8* __restrict__ wTiles,  // planes.cuh
                  const float* __restrict__ actScale, const float* __restrict__ weightScale,  // [1]; [1] or [N]
                  const void* __restrict__ bias, uint8* __restrict__ y,  // [N] or null; [M, N] of kDtype, or codes
                  const float* __restrict__ multiplier, const int* __restrict__ slots,  // of the next Linear
                  const int* __restrict__ slotStarts, int perChannel, int slotCount, int top, int activation,
                  int rowScales,  // whether weightScale is [N]
                  int biasDtype, int M, int N, int kTiles, int tilesX, int tilesW) {  // tiles of K, along x, along W
    // Two consumers start with 65536 / 384 registers a thread; the producer hands most of its own over.
    constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
    static_assert(kConsumers == 1 || kConsumers == 2, "one or two consumer warpgroups");
    constexpr int kBlocksW = kTileN / kBlockRows;
    constexpr uint32 kStageBytes = (kConsumers + kBlocksW) * kPlaneBytes;

    extern __shared__ uint8 dynamicShared[];
    __shared__ uint64 full[kStages], empty[kStages];
    __shared__ __align__(16) float scales[kConsumers][kTileN];
    __shared__ __align__(16) float biases[kConsumers][kTileN];
    __shared__ __align__(16) float factors[kConsumers][kRequantize ? kTileN : 1];
    __shared__ __align__(16) float scratch[kConsumers][kWarpgroup / kWarpSize][kRequantize ? kScratchFloats : 1];
    const uint32 base = (sharedAddress(dynamicShared) + kSharedAlignment - 1) & ~uint32(kSharedAlignment - 1);
    const int warpgroup = threadIdx.x / kWarpgroup, thread = threadIdx.x % kWarpgroup;
    const int tiles = tilesX * tilesW;
    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; s++) {
            barrierInit(&full[s], 1);
            barrierInit(&empty[s], kConsumers);
        }
        barrierInitFence();
    }
    __syncthreads();

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
        if (thread >= kWarpSize || !electLane()) return;
        for (int index = blockIdx.x; index < tiles; index += blockCount()) {
            int tileX, tileW;
            tileAt(index, tilesX, tilesW, tileX, tileW);
            const BlockCopies<kConsumers, kPlaneBytes> ofX(xTiles, tileX * kConsumers, (M - 1) / kBlockRows, kTiles);
            const BlockCopies<kBlocksW, kPlaneBytes> ofW(wTiles, tileW * kBlocksW, (N - 1) / kBlockRows, kTiles);
            for (int k = 0; k < kTiles; k++, advance()) {
                barrierWait(&empty[stage], parity ^ 1);
                barrierExpect(&full[stage], kStageBytes);
                const uint32 address = base + stage * kStageBytes;
                ofX.start(address, &full[stage], k);
                ofW.start(address + kConsumers * kPlaneBytes, &full[stage], k);
            }
        }
    } else {
        if constexpr (kConsumers == 2) takeRegisters<kConsumerRegisters>();
        const int consumer = warpgroup - 1, barrier = warpgroup;
        const auto releaseBefore = [&] {  // the stage before this one
            if (thread == 0) barrierArrive(&empty[stage == 0 ? kStages - 1 : stage - 1]);
        };
        const Output out{y, M, N};
        const Scales stored{*actScale, weightScale, rowScales};
        const Following next{y, multiplier, slots, slotStarts, perChannel, slotCount, top, activation};
        for (int index = blockIdx.x; index < tiles; index += blockCount()) {
            int sums[kTileN / 2];
            const auto multiply = [&](auto first) {
                barrierWait(&full[stage], parity);
                const uint32 address = base + stage * kStageBytes;
                multiplyStage<kTileN, decltype(first)::value>(sums, address + consumer * kPlaneBytes,
                                                                address + kConsumers * kPlaneBytes);
            };
            multiply(Constant<true>{});
            int tileX, tileW;
            tileAt(index, tilesX, tilesW, tileX, tileW);
            for (int c = thread; c < kTileN; c += kWarpgroup) {  // while the first products run
                scales[consumer][c] = scaleOf(stored, tileW * kTileN + c, N);
                biases[consumer][c] = biasOf(bias, biasDtype, tileW * kTileN + c, N);
                if constexpr (kRequantize) factors[consumer][c] = factorOf(next, tileW * kTileN + c, N);
            }
            advance();
            for (int k = 1; k < kTiles; k++, advance()) {
                multiply(Constant<false>{});
                productWait<1>();
                releaseBefore();
            }
            productWait<0>();
            releaseBefore();
            const int m = (tileX * kConsumers + consumer) * kWgmmaRows, n = tileW * kTileN;
            namedSync(barrier, kWarpgroup);  // scales and biases are there
            if constexpr (kRequantize) {
                requantizeTile<kTileN, kDtype>(sums, out, next, scales[consumer], biases[consumer],
                                                 factors[consumer], scratch[consumer][thread / kWarpSize], m, n,
                                                 thread);
            } else if (isWhole(out, m, kWgmmaRows, n, kTileN)) {
                writeTile<true, kTileN, kDtype>(sums, out, scales[consumer], biases[consumer], m, n, thread);
            } else {
                writeTile<false, kTileN, kDtype>(sums, out, scales[consumer], biases[consumer], m, n, thread);
            }
            namedSync(barrier, kWarpgroup);  // all have read them
        }
    }
}
