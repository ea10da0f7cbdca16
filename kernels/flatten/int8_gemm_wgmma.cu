// int8GemmWgmma: y[M, N] = actScale * weightScale * (x W^T) + bias for INT8 codes, on Hopper's warpgroup products
// (sm_90a). kRequantize: instead of y, the codes of activation(y) for the next Linear (int8_requantize.cuh).
//
// Operands stand in tiles of 64 rows x 128 columns in the order of the products' shared memory (bipolar.cuh), so a tile
// is one bulk copy and no tensor map is needed. Sums are exact int32 (FlattenQuant 4.1: per-tensor scales come last).
//
//   block = 1 producer warpgroup + kConsumers consumer warpgroups, each 64 rows of x against kColumns rows of W
//   stage = one k tile of both operands; kStages of them in flight
//   grid: persistent; tiles of x run fastest within groups, so the blocks in flight share operands in L2
//
// Tiles that reach behind the last block of an operand copy that block again; what comes of it is not written.
// Any M, N and K; integer sums in a fixed order repeat bit for bit.
#include "int8_requantize.cuh"
#include "../shared/wgmma.cuh"

constexpr int kGroupTiles = 16;  // tiles of x per group of the tile order
constexpr int kSteps = kSwizzleBytes / kWgmmaDepthBytes;
constexpr int kSharedAlignment = 1024;

constexpr ProductKind kSignedBytes = static_cast<ProductKind>(2);
#define QK_SIGNED(columns, regs, a, b, k) \
    QK_PRODUCT(kSignedBytes, columns, "m64n" #columns "k32", ".s32.s8.s8", regs, a, b, k)
QK_SIGNED(64, 32, 32, 33, 34)
QK_SIGNED(128, 64, 64, 65, 66)
QK_SIGNED(256, 128, 128, 129, 130)

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
template <int kColumns, bool kFirst>
__device__ __forceinline__ void multiplyStage(int* sums, uint32 addressX, uint32 addressW) {
    productFence();
#pragma unroll
    for (int s = 0; s < kSteps; s++) {
        WarpgroupProduct<kSignedBytes, kColumns>::add(sums, operandDescriptor(addressX + s * kWgmmaDepthBytes),
                                                      operandDescriptor(addressW + s * kWgmmaDepthBytes),
                                                      !(kFirst && s == 0));
    }
    productCommit();
}

// Eight neighbours in shared memory, aligned to 16 bytes.
__device__ __forceinline__ void loadRun(const float* from, float (&to)[kRunChannels]) {
    const float4 low = reinterpret_cast<const float4*>(from)[0], high = reinterpret_cast<const float4*>(from)[1];
    const float all[kRunChannels] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < kRunChannels; i++) to[i] = all[i];
}

// One consumer's 64 rows; biases: of the tile's channels, in shared memory.
template <bool kWhole, int kColumns, int kDtype>
__device__ __forceinline__ void writeTile(const int* sums, const Output& out, const float* biases, int token,
                                          int channel, int thread) {
    const int lane = thread % kWarpSize, row = token + thread / kWarpSize * 16 + lane / 4;
#pragma unroll
    for (int start = 0; start < kColumns; start += kRunRows) {
        const int first = start + lane % 4 * kRunChannels;
        float bias[kRunChannels];
        loadRun(biases + first, bias);
        writeRun<kWhole, kDtype>(sums + start / kRunRows * kRunDots, out, bias, row, channel + first);
    }
}

// One consumer's 64 rows as codes of the next Linear; biases, factors: of the tile's channels. Runs of 32 channels take
// turns on one copy of the code behind the sums, which registers hold and no index reaches.
template <int kColumns, int kDtype>
__device__ __forceinline__ void requantizeTile(const int* sums, const Output& out, const Following& next,
                                               const float* biases, const float* factors, float* scratch, int token,
                                               int channel, int thread) {
    const int lane = thread % kWarpSize, firstToken = token + thread / kWarpSize * kGroupRows;
    if (firstToken >= out.M) return;
    const int runs = min(kColumns, out.N - channel + kRunRows - 1) / kRunRows;
    const int* starts = next.slotStarts + channel / kRunRows;
    int slotFirst = starts[0], slotEnd = starts[1];
#pragma unroll 1
    for (int run = 0; run < runs; run++) {
        const LaneSlots slots = laneSlots(next, slotFirst, slotEnd, lane);
        slotFirst = slotEnd;
        slotEnd = starts[min(run + 2, runs)];
        const int first = run * kRunRows + lane % 4 * kRunChannels;
        float bias[kRunChannels], factor[kRunChannels];
        loadRun(biases + first, bias);
        loadRun(factors + first, factor);
        uint32 word[kRunChannels];
#pragma unroll
        for (int r = 0; r < kColumns / kRunRows; r++) {
            if (r == run) roundRun<kDtype>(sums + r * kRunDots, out.scale, bias, word);
        }
        requantizeRun<kDtype>(word, next, slots, factor, scratch, firstToken, channel + run * kRunRows, out.M, out.N,
                              lane);
    }
}

template <int kColumns, int kConsumers, int kStages, int kDtype, bool kRequantize>
__global__ void __launch_bounds__((kConsumers + 1) * kWarpgroup, 1)
    int8GemmWgmma(const uint8* __restrict__ xTiles, const uint8* __restrict__ wTiles,  // bipolar.cuh
                  const float* __restrict__ actScale, const float* __restrict__ weightScale,  // [1] each
                  const void* __restrict__ bias, uint8* __restrict__ y,  // [N] or null; [M, N] of kDtype, or codes
                  const float* __restrict__ multiplier, const int* __restrict__ slots,  // of the next Linear
                  const int* __restrict__ slotStarts, int perChannel, int slotCount, int top, int activation,
                  int biasDtype, int M, int N, int kTiles, int tilesX, int tilesW) {   // tiles of K, along x, along W
    // Two consumers start with 65536 / 384 registers a thread; the producer hands most of its own over.
    constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
    static_assert(kConsumers == 1 || kConsumers == 2, "one or two consumer warpgroups");
    constexpr int kBlocksW = kColumns / kBlockRows;
    constexpr uint32 kStageBytes = (kConsumers + kBlocksW) * kPlaneBytes;

    extern __shared__ uint8 dynamicShared[];
    __shared__ uint64 full[kStages], empty[kStages];
    __shared__ __align__(16) float biases[kConsumers][kColumns];
    __shared__ __align__(16) float factors[kConsumers][kRequantize ? kColumns : 1];
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
        const Output out{y, __fmul_rn(*actScale, *weightScale), M, N};
        const Following next{y, multiplier, slots, slotStarts, perChannel, slotCount, top, activation};
        for (int index = blockIdx.x; index < tiles; index += blockCount()) {
            int sums[kColumns / 2];
            const auto multiply = [&](auto first) {
                barrierWait(&full[stage], parity);
                const uint32 address = base + stage * kStageBytes;
                multiplyStage<kColumns, decltype(first)::value>(sums, address + consumer * kPlaneBytes,
                                                                address + kConsumers * kPlaneBytes);
            };
            multiply(Constant<true>{});
            int tileX, tileW;
            tileAt(index, tilesX, tilesW, tileX, tileW);
            for (int c = thread; c < kColumns; c += kWarpgroup) {  // while the first products run
                biases[consumer][c] = biasOf(bias, biasDtype, tileW * kColumns + c, N);
                if constexpr (kRequantize) factors[consumer][c] = factorOf(next, tileW * kColumns + c, N);
            }
            advance();
            for (int k = 1; k < kTiles; k++, advance()) {
                multiply(Constant<false>{});
                productWait<1>();
                releaseBefore();
            }
            productWait<0>();
            releaseBefore();
            const int token = (tileX * kConsumers + consumer) * kWgmmaRows, channel = tileW * kColumns;
            namedSync(barrier, kWarpgroup);  // the biases are there
            if constexpr (kRequantize) {
                requantizeTile<kColumns, kDtype>(sums, out, next, biases[consumer], factors[consumer],
                                                 scratch[consumer][thread / kWarpSize], token, channel, thread);
            } else if (isWhole(out, token, kWgmmaRows, channel, kColumns)) {
                writeTile<true, kColumns, kDtype>(sums, out, biases[consumer], token, channel, thread);
            } else {
                writeTile<false, kColumns, kDtype>(sums, out, biases[consumer], token, channel, thread);
            }
            namedSync(barrier, kWarpgroup);  // all have read the biases
        }
    }
}
