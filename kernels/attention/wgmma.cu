// int8AttentionWgmma: mma.cu without a mask, on Hopper's warpgroup products (sm_90a). Same results, bit for
// bit: the codes of Q, K and V, the order of passes and the rounding of P are the same, and sums are integers.
//
//   block = 1 producer warpgroup + 2 consumer warpgroups, each 64 rows of Q, whose codes stay in registers
//   stage = 128 keys of K or of V, as the products read them; kStages of them in flight, one bulk copy each
//   grid: persistent; of all heads the rows that see most keys first
//
// Pass 1 copies K, pass 2 K and V alternately. Scores of 64 keys are one group of products. While it runs, the warpgroup
// works on the 64 keys before: on their largest score in pass 1, in pass 2 on their codes of P, which as they lie in
// its registers are the first operand of P V. So products, exponentials and copies overlap within each warpgroup.
//
// Tiles of K and V (quantize.cu): lines of 128 bytes, whose 16-byte chunks are XORed with line % 8.
//   K   64 dims: line r holds keys r and r + 64. 128 dims: 64 lines of keys 0 .., then 64 lines of keys 64 ...
//   V   line n holds one dim (columnDim of n / 8, n % 8) of 128 keys; byte 4 t + 2 c + e of 16 is key 8 c + 2 t + e: a
//       lane holds the scores of these four keys, and its register of P is bytes 4 t .. of the other operand.
#include "rows.cuh"
#include "../shared/wgmma.cuh"

constexpr int kConsumers = QK_CONSUMERS;
constexpr int kThreads = (kConsumers + 1) * kWarpgroup;
constexpr int kBlockRows = kConsumers * kWgmmaRows;
constexpr int kStageKeys = QK_STAGE_KEYS, kHalfKeys = kStageKeys / 2;  // of a stage, and of one group of products
constexpr int kScores = kHalfKeys / 2;           // of a thread: two rows
constexpr int kHalfSteps = kHalfKeys / kWgmmaDepthBytes;
constexpr int kSharedAlignment = QK_SHARED_ALIGNMENT;
constexpr int kLeast = int(0x80000000u);

template <int kColumns>
struct SignedProduct;

// D[64, columns] += A B of signed bytes; A in registers as a of signedMma32 for the 16 rows of each warp.
#define WG_SIGNED(columns, regs, a, b, c, e, desc, k) \
    template <> \
    struct SignedProduct<columns> { \
        __device__ static __forceinline__ void add(int* d, uint4 x, uint64 descB, int keep) { \
            asm volatile("{.reg .pred p; setp.ne.b32 p, %" #k ", 0;\nwgmma.mma_async.sync.aligned.m64n" #columns \
                         "k32.s32.s8.s8 {" WG_L##regs "}, {%" #a ", %" #b ", %" #c ", %" #e "}, %" #desc ", p;\n}" \
                         : WG_D##regs \
                         : "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "l"(descB), "r"(keep)); \
        } \
    };
WG_SIGNED(64, 32, 32, 33, 34, 35, 36, 37)
WG_SIGNED(128, 64, 64, 65, 66, 67, 68, 69)

template <bool kValue>
struct Constant {
    static constexpr bool value = kValue;
};

// What products that were waited for have written: no use of it may move before the wait.
template <int kCount>
__device__ __forceinline__ void takeResults(int (&d)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i++) asm volatile("" : "+r"(d[i])::"memory");
}

struct Problem {
    int heads, items, blocks, M, T, causal;  // items: row blocks of all heads of the batch
};

// One block's rows of one head; tiles: of keys that they see.
struct Item {
    int head, batch, row, tiles;
};

__device__ __forceinline__ Item itemAt(int index, const Problem& p) {
    const int allHeads = p.items / p.blocks, head = index % allHeads;
    const int row = (p.blocks - 1 - index / allHeads) * kBlockRows, last = min(row + kBlockRows, p.M) - 1;
    const int keys = p.causal ? min(p.T, max(last + p.T - p.M + 1, 0)) : p.T;
    return {head % p.heads, head / p.heads, row, (keys + kStageKeys - 1) / kStageKeys};
}

// Every other round of the grid runs backwards, so that no block has the longest item of each.
__device__ __forceinline__ int itemIndex(int round) {
    const int blocks = blockCount();
    return round * blocks + (round % 2 ? blocks - 1 - int(blockIdx.x) : int(blockIdx.x));
}

// Codes of rows `row` and `row` + 8; returns a bit per row that holds a NaN.
template <int kDim, bool kWide>
__device__ __forceinline__ int loadQuery(uint4 (&q)[kDim / 32], const Source& from, const Step& step, size_t start,
                                         int row, int M, int lane) {
    Raw<4, kWide> raw[kDim / 8];
#pragma unroll
    for (int i = 0; i < kDim / 8; i++) {
        const int m = row + i % 2 * 8, dim = i / 2 * 16 + lane % 4 * 4;
        raw[i] = loadRaw<4, kWide>(from, start + size_t(m) * from.rowStride, dim, m < M);
    }
    float none = 0.f;  // NaN if one of them is NaN or Inf
    const auto take = [&](auto plain) {
        int bad = 0;
#pragma unroll
        for (int run = 0; run < kDim / 32; run++) {
            uint32 word[4];
#pragma unroll
            for (int w = 0; w < 4; w++) {
                float x[4];
                uint32 code[4];
                floatsOf(raw[4 * run + w], from.dtype, x);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    if constexpr (decltype(plain)::value) {
                        none = __fmaf_rn(x[i], 0.f, none);
                        code[i] = plainCodeOf(x[i], step);
                    } else {
                        bad |= int(x[i] != x[i]) << w % 2;
                        code[i] = codeOf(x[i], step);
                    }
                }
                word[w] = packBytes(code[0], code[1], code[2], code[3]);
            }
            q[run] = make_uint4(word[0], word[1], word[2], word[3]);
        }
        return bad;
    };
    int bad = take(Constant<true>{});
    if (step.lift != 1.f || none != 0.f) bad = take(Constant<false>{});
    bad |= __shfl_xor_sync(kFullWarp, bad, 1);
    return bad | __shfl_xor_sync(kFullWarp, bad, 2);
}

// Start Q K^T of 64 keys: integers, or as floats above kIntegerBase.
template <int kDim, bool kFloats>
__device__ __forceinline__ void startScores(int (&s)[kScores], const uint4 (&q)[kDim / 32], uint32 keys) {
    if constexpr (kFloats) {
#pragma unroll
        for (int i = 0; i < kScores; i++) s[i] = kIntegerBaseBits;
    }
    productFence();
#pragma unroll
    for (int step = 0; step < kDim / 32; step++) {
        const uint64 desc = operandDescriptor(keys + step * kWgmmaDepthBytes);
        SignedProduct<kHalfKeys>::add(s, q[step], desc, kFloats || step > 0);
    }
    productCommit();
}

// What keys this lane's rows see: those up to last[half]. warpLast: of the first row of its warp.
struct Sight {
    int last[2], warpLast;
};

// Scores of 64 keys with `hidden` for those that a row does not see. key: the first; inStep: this lane's first of them.
__device__ __forceinline__ void hide(int (&s)[kScores], const Sight& sight, int key, int inStep, int hidden) {
    if (key + kHalfKeys - 1 <= sight.warpLast) return;
#pragma unroll
    for (int i = 0; i < kScores; i++) {
        if (key + inStep + i / 4 * 8 + i % 2 > sight.last[i % 4 / 2]) s[i] = hidden;
    }
}

// The codes of P of 64 keys, as first operands of P V.
__device__ __forceinline__ void takeCodes(uint4 (&p)[kHalfSteps], int (&total)[1][2], const int (&s)[kScores],
                                          const float (&largest)[1][2], float exponentStep) {
#pragma unroll
    for (int j = 0; j < kHalfSteps; j++) {
        uint32 word[4];
#pragma unroll
        for (int w = 0; w < 4; w++) {
            const int half = w % 2, at = 16 * j + w / 2 * 8 + 2 * half;
            word[w] = probabilityWord(s[at], s[at + 1], s[at + 4], s[at + 5], largest[0][half], exponentStep);
            total[0][half] = __dp4a(int(word[w]), int(kOnes), total[0][half]);
        }
        p[j] = make_uint4(word[0], word[1], word[2], word[3]);
    }
}

// Start adding P V of 64 keys. values: where these keys of V stand.
template <int kDim>
__device__ __forceinline__ void startSums(int (&sums)[kDim / 2], const uint4 (&p)[kHalfSteps], uint32 values) {
    productFence();
#pragma unroll
    for (int j = 0; j < kHalfSteps; j++) {
        SignedProduct<kDim>::add(sums, p[j], operandDescriptor(values + j * kWgmmaDepthBytes), 1);
    }
    productCommit();
}

template <int kDim, int kStages>
__global__ void __launch_bounds__(kThreads, 1)
    int8AttentionWgmma(const void* __restrict__ query,   // [batch, heads, M, dims]
                       const uint8* __restrict__ tiles,  // [batch, heads / group, tiles of 128 keys, K and V]
                       void* __restrict__ out,           // [batch, M, heads, valueDims], a multiple of 8
                       float queryStep, float valueStep, float exponentStep,  //
                       int queryBatch, int queryHead, int queryRow, int queryDims,  // strides in elements
                       int M, int T, int heads, int items, int group,  //
                       int valueDims, int causal, int dtype) {
    static_assert(kDim == 64 || kDim == 128, "lines of 128 bytes hold one key or two");
    // Two consumers start with 65536 / 384 registers a thread; the producer hands most of its own over.
    constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
    constexpr uint32 kStageBytes = kStageKeys * kDim;
    constexpr uint32 kSecondKeys = kDim == 64 ? kDim : kHalfKeys * kSwizzleBytes;  // where keys from 64 on stand

    extern __shared__ uint8 dynamicShared[];
    __shared__ uint64 full[kStages], empty[kStages];
    const uint32 base = (sharedAddress(dynamicShared) + kSharedAlignment - 1) & ~uint32(kSharedAlignment - 1);
    const int warpgroup = threadIdx.x / kWarpgroup, thread = threadIdx.x % kWarpgroup;
    const int blocks = (M + kBlockRows - 1) / kBlockRows;
    const Problem problem{heads, items, blocks, M, T, causal};
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
        giveRegisters<kProducerRegisters>();
        if (thread >= kWarpSize || !electLane()) return;
        const size_t headBytes = size_t((T + kStageKeys - 1) / kStageKeys) * 2 * kStageBytes;
        for (int round = 0; itemIndex(round) < items; round++) {
            const Item item = itemAt(itemIndex(round), problem);
            const uint8* own = tiles + (size_t(item.batch) * (heads / group) + item.head / group) * headBytes;
            const auto copy = [&](int piece) {  // K and V of every tile, one after the other
                barrierWait(&empty[stage], parity ^ 1);
                barrierExpect(&full[stage], kStageBytes);
                copyBulk(base + stage * kStageBytes, own + size_t(piece) * kStageBytes, kStageBytes, &full[stage]);
                advance();
            };
            for (int tile = 0; tile < item.tiles; tile++) copy(2 * tile);
            for (int piece = 0; piece < 2 * item.tiles; piece++) copy(piece);
        }
        return;
    }
    takeRegisters<kConsumerRegisters>();
    const auto take = [&] {
        barrierWait(&full[stage], parity);
        const int taken = stage;
        advance();
        return taken;
    };
    const auto release = [&](int taken) {
        if (thread == 0) barrierArrive(&empty[taken]);
    };
    const int lane = thread % kWarpSize, inStep = lane % 4 * 2;
    const int warpRow = (warpgroup - 1) * kWgmmaRows + thread / kWarpSize * 16;
    const Source from{query, queryBatch, queryHead, queryRow, queryDims, dtype};
    for (int round = 0; itemIndex(round) < items; round++) {
        const Item item = itemAt(itemIndex(round), problem);
        const int firstRow = item.row + warpRow, row = firstRow + lane / 4;
        const auto lastOf = [&](int m) { return min(T - 1, causal ? m + T - M : T - 1); };
        const Sight sight{{lastOf(row), lastOf(row + 8)}, lastOf(firstRow)};
        uint4 q[kDim / 32];
        const size_t start = rowStart(from, item.batch, item.head, 0);
        const Step step = stepOf(queryStep);
        const int bad = dtype == kFloat32 ? loadQuery<kDim, true>(q, from, step, start, row, M, lane)
                                          : loadQuery<kDim, false>(q, from, step, start, row, M, lane);

        int s0[kScores], s1[kScores];  // of the first and the second 64 keys of a tile
        int most[2] = {kLeast, kLeast}, current = 0;
        const auto takeLargest = [&](int (&s)[kScores], int key) {
            takeResults(s);
            hide(s, sight, key, inStep, kLeast);
#pragma unroll
            for (int i = 0; i < kScores; i++) most[i % 4 / 2] = max(most[i % 4 / 2], s[i]);
        };
        const auto findLargest = [&](int tile, auto more) {  // s0 is there
            startScores<kDim, false>(s1, q, base + current * kStageBytes + kSecondKeys);
            takeLargest(s0, tile * kStageKeys);
            productWait<0>();
            release(current);
            if constexpr (decltype(more)::value) {
                current = take();
                startScores<kDim, false>(s0, q, base + current * kStageBytes);
            }
            takeLargest(s1, tile * kStageKeys + kHalfKeys);
            productWait<0>();
        };
        if (item.tiles > 0) {
            current = take();
            startScores<kDim, false>(s0, q, base + current * kStageBytes);
            productWait<0>();
            for (int tile = 0; tile + 1 < item.tiles; tile++) findLargest(tile, Constant<true>{});
            findLargest(item.tiles - 1, Constant<false>{});
        }
        float largest[1][2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            largest[0][i] = __int_as_float(most[i] == kLeast ? kMinusInfinityBits : most[i] + kIntegerBaseBits);
        }
        finishLargest(largest, bad);

        int sums[1][kDim / 8][4] = {}, total[1][2] = {}, before = -1;
        int(&flat)[kDim / 2] = reinterpret_cast<int(&)[kDim / 2]>(sums);
        uint4 p0[kHalfSteps], p1[kHalfSteps] = {};
        const auto addValues = [&](int tile, auto more) {  // s0 is there; p1: of the keys before, or 0 with any values
            const int keys = current, key = tile * kStageKeys;
            startScores<kDim, true>(s1, q, base + keys * kStageBytes + kSecondKeys);
            startSums<kDim>(flat, p1, base + max(before, 0) * kStageBytes + kHalfKeys);
            hide(s0, sight, key, inStep, kMinusInfinityBits);
            takeCodes(p0, total, s0, largest, exponentStep);
            const int values = take();
            productWait<0>();
            takeResults(s1);
            release(keys);
            if (before >= 0) release(before);
            before = values;
            if constexpr (decltype(more)::value) {
                current = take();
                startScores<kDim, true>(s0, q, base + current * kStageBytes);
            }
            startSums<kDim>(flat, p0, base + values * kStageBytes);
            hide(s1, sight, key + kHalfKeys, inStep, kMinusInfinityBits);
            takeCodes(p1, total, s1, largest, exponentStep);
            productWait<0>();
            takeResults(s0);
        };
        if (item.tiles > 0) {
            current = take();
            startScores<kDim, true>(s0, q, base + current * kStageBytes);
            productWait<0>();
            takeResults(s0);
            for (int tile = 0; tile + 1 < item.tiles; tile++) addValues(tile, Constant<true>{});
            addValues(item.tiles - 1, Constant<false>{});
            startSums<kDim>(flat, p1, base + before * kStageBytes + kHalfKeys);
            productWait<0>();
            release(before);
        }
        takeResults(flat);
        const size_t first = ((size_t(item.batch) * M + row) * heads + item.head) * valueDims;
        writeRows<kDim>(out, sums, total, largest, valueStep, first, heads * valueDims, row, M, valueDims, dtype, lane);
    }
}
