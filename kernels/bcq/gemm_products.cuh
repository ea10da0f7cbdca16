// The tensor cores that a fused product (gemm.cuh) uses: of a group of four warps on Hopper, of a warp elsewhere.
#pragma once
#include "gemm.cuh"
#include "../shared/wgmma.cuh"

// A warp's registers: what a launch allots, in steps of 8, less what the copying warps keep, which may sum x as well. More
// is never handed out, and nothing where a consumer would get no step more.
template <int kGroups, bool kConsumes, bool kSums>
__device__ __forceinline__ void shareRegisters() {
    constexpr int kAll = QK_PROCESSOR_REGISTERS, kMost = 240, kStep = 8;
    constexpr int kKept = kSums ? 56 : kGroups <= 3 ? 40 : kGroups == 4 ? 32 : 24;  // four groups get no more for a step less
    constexpr int kLaunched = kAll / (kGroupThreads * (kGroups + 1)) / kStep * kStep;
    constexpr int kShare = (kLaunched * (kGroups + 1) - kKept) / kGroups / kStep * kStep;
    if constexpr (kShare > kLaunched) {
        if constexpr (kConsumes) takeRegisters<(kShare < kMost ? kShare : kMost)>();
        else giveRegisters<kKept>();
    }
}

template <int kDtype, int kTokens, int kPartners = 1>
struct WarpgroupProducts {
    static constexpr bool kCollective = true;
    static constexpr int kCopyArrivals = 1;

    // A stage of x is one bulk copy, or one of its tensor map for every panel: boxes of kTokens rows and kPanelK columns,
    // 128-byte swizzle, zeros behind the rows and columns of x. Partners copy half of the bytes or rows each.
    struct Copies {
        uint32 stages;
        __device__ __forceinline__ explicit Copies(uint32 first) : stages(first) {}
        template <int kBytes>
        __device__ __forceinline__ void stage(const uint4* from, uint32 barrier, int stage, int) const {
            constexpr int kOwn = kBytes / kPartners;
            const int own = partner<kPartners>() * kOwn;
            const uint32 to = stages + stage * kBytes + own;
            barrierExpect(barrier, kBytes);
            if constexpr (kPartners > 1) copyBulkToPair(to, from + own / kVectorBytes, kOwn, barrier);
            else copyBulk(to, from, kOwn, barrier);
        }
        __device__ __forceinline__ void prepare(const uint4* map) const { prefetchTensorMap(map); }
        template <int kPanels>
        __device__ __forceinline__ void rows(const GemmProblem& p, int token, int column, uint32 barrier, int stage,
                                             int) const {
            constexpr int kBytes = kTokens * kPanelRowBytes;
            const int row = partner<kPartners>() * (kTokens / kPartners);
            const uint32 to = stages + stage * kPanels * kBytes + row * kPanelRowBytes;
            barrierExpect(barrier, kPanels * kBytes);
#pragma unroll
            for (int i = 0; i < kPanels; ++i) {
                if constexpr (kPartners > 1) copyBoxToPair(to + i * kBytes, p.x, column + i * kPanelK, token + row, barrier);
                else copyBox(to + i * kBytes, p.x, column + i * kPanelK, token, barrier);
            }
        }
    };
    static __device__ __forceinline__ bool oneLane() { return electLane(); }
    static __device__ __forceinline__ bool copies(int warp) { return warp == 0 && electLane(); }

    template <int kGroups, bool kConsumes, bool kSums = false>
    static __device__ __forceinline__ void registers() { shareRegisters<kGroups, kConsumes, kSums>(); }

    uint64 start;  // the descriptor of a stage

    __device__ __forceinline__ void take(uint32 stage, int) { start = operandDescriptor(stage); }
    // What a step of a panel adds to a descriptor.
    static __device__ __forceinline__ uint32 placeOf(int panel, int step) {
        return (panel * kTokens * kPanelRowBytes + step * kWgmmaDepthBytes) >> 4;
    }
    __device__ __forceinline__ void fence() { productFence(); }
    template <bool kKeep = true>
    __device__ __forceinline__ void add(float* acc, uint32 a0, uint32 a1, uint32 a2, uint32 a3, int panel, int step) {
        RegisterProduct<kDtype, kTokens>::template add<kKeep>(acc, a0, a1, a2, a3, start + placeOf(panel, step));
    }
    __device__ __forceinline__ void commit() { productCommit(); }
    template <int kPending>
    __device__ __forceinline__ void wait() { productWait<kPending>(); }
};

template <int kDtype, int kTokens>
struct WarpProducts {
    static constexpr bool kCollective = false;
    static constexpr int kCopyArrivals = kGroupThreads, kTokenTiles = kTokens / 8;

    // All threads of the group copy a stage of x.
    struct Copies {
        uint32 first, fill;
        __device__ __forceinline__ explicit Copies(uint32 stages)
            : first(stages), fill(stages + threadIdx.x % kGroupThreads * kVectorBytes) {}
        template <int kBytes>
        __device__ __forceinline__ void stage(const uint4* from, uint32 barrier, int stage, int stages) {
            constexpr int kVectors = kBytes / kVectorBytes;
            static_assert(kVectors % kGroupThreads == 0, "every thread copies as much");
#pragma unroll
            for (int i = 0; i < kVectors; i += kGroupThreads) {
                copyAsync16(fill + i * kVectorBytes, from + i + threadIdx.x % kGroupThreads);
            }
            barrierArriveBehindCopies(barrier);
            fill += stage + 1 == stages ? kBytes - stages * kBytes : kBytes;
        }
        __device__ __forceinline__ void prepare(const uint4*) const {}
        // Of x [M, K] as it is, K % 8 == 0 and rows 16-byte aligned. A thread copies a chunk of every kRows-th row. What
        // rows behind the last get is the last one's: their products are not written.
        template <int kPanels>
        __device__ __forceinline__ void rows(const GemmProblem& p, int token, int column, uint32 barrier, int stage,
                                             int) const {
            constexpr int kRows = kGroupThreads / kPanelChunks, kValues = kVectorBytes / kShortBytes;
            static_assert(kTokens % kRows == 0 && kRows % kPanelChunks == 0, "a thread keeps its place in the swizzle");
            const int thread = threadIdx.x % kGroupThreads, row = thread / kPanelChunks, chunk = thread % kPanelChunks;
            const uint32 swizzled = row * kPanelRowBytes + (chunk ^ row % kPanelChunks) * kVectorBytes;
            const uint32 to = first + stage * kPanels * kTokens * kPanelRowBytes + swizzled;
            const uint16* x = reinterpret_cast<const uint16*>(p.x);
#pragma unroll
            for (int i = 0; i < kPanels; ++i) {
                const int k = column + i * kPanelK + chunk * kValues;
                const bool present = k < p.K;
                const uint16* from = x + (present ? k : 0);
#pragma unroll
                for (int m = 0; m < kTokens; m += kRows) {
                    copyAsync16Or0(to + (i * kTokens + m) * kPanelRowBytes,
                                   from + size_t(min(token + row + m, p.M - 1)) * p.K, present);
                }
            }
            barrierArriveBehindCopies(barrier);
        }
    };
    static __device__ __forceinline__ bool oneLane() { return threadIdx.x % kWarpSize == 0; }
    static __device__ __forceinline__ bool copies(int) { return true; }
    template <int kGroups, bool kConsumes, bool kSums = false>
    static __device__ __forceinline__ void registers() {}

    uint32 start, swizzle;

    // Lane l points at row l % 8 of matrix l / 8: two of columns 0-7 and 8-15 of 8 tokens, then of the next 8.
    __device__ __forceinline__ void take(uint32 stage, int lane) {
        start = stage + (lane % 8 + (kTokenTiles > 1 ? lane / 16 * 8 : 0)) * kPanelRowBytes;
        swizzle = (lane / 8 % 2 ^ lane % 8) * kVectorBytes;
    }
    __device__ __forceinline__ void fence() {}
    __device__ __forceinline__ void add(float* acc, uint32 a0, uint32 a1, uint32 a2, uint32 a3, int panel, int step) {
        const uint32 from = start + panel * kTokens * kPanelRowBytes + (swizzle ^ step * 2 * kVectorBytes);
        const uint4 a = make_uint4(a0, a1, a2, a3);
        if constexpr (kTokenTiles == 1) {
            const uint2 b = loadTwoMatrices(from);
            shortMma16<kDtype>(acc, a, b.x, b.y);
            return;
        }
#pragma unroll
        for (int j = 0; j + 1 < kTokenTiles; j += 2) {
            const uint4 b = loadMatrices(from + j * 8 * kPanelRowBytes);
            shortMma16<kDtype>(acc + j * 4, a, b.x, b.y);
            shortMma16<kDtype>(acc + (j + 1) * 4, a, b.z, b.w);
        }
    }
    __device__ __forceinline__ void commit() {}
    template <int kPending>
    __device__ __forceinline__ void wait() {}
};

template <bool kWarpgroup, int kDtype, int kTokens, int kPartners = 1>
struct ProductsOf {
    using Type = WarpProducts<kDtype, kTokens>;
};
template <int kDtype, int kTokens, int kPartners>
struct ProductsOf<true, kDtype, kTokens, kPartners> {
    using Type = WarpgroupProducts<kDtype, kTokens, kPartners>;
};
