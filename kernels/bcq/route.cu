// Sorts pairs of a token and a chosen expert by expert, into tiles of tokens of one expert each, for bcqExpertsGemm.
//
//   slots        [tile][tileTokens]  the pair that stands there, or -1 behind an expert's last
//   tileExperts  [tile]              whose pairs they are
//   tileCount    [1]                 tiles in use; the grid and the tensors are for the most there can be
//
// One block. Its warps share the pairs in contiguous parts. Each counts its pairs of every expert, a warp adds the counts
// up over warps and experts, and each puts its pairs where the pairs before them end: pairs of an expert keep their order,
// without atomics. A choice of no expert has no slot: the rows y of such pairs are made zero here.
#include "../shared/common.cuh"
#include "../shared/mma.cuh"

constexpr int kThreads = QK_ROUTE_THREADS, kWarps = kThreads / kWarpSize;
constexpr int kBatch = 8;  // choices that a lane reads at once

namespace {

// The lanes that have the same number as this one.
__device__ __forceinline__ uint32 equalLanes(int number) {
    uint32 lanes;
    asm volatile("match.any.sync.b32 %0, %1, %2;" : "=r"(lanes) : "r"(number), "r"(kFullWarp));
    return lanes;
}

}  // namespace

__global__ void __launch_bounds__(kThreads)
bcqRoute(const long long* chosen,              // [pairs]; written until the wait, so not __restrict__
         int* __restrict__ slots, int* __restrict__ tileExperts, int* __restrict__ tileCount,
         uint16* __restrict__ y,                // [pairs, N]
         int pairs, int experts, int tileTokens, int mostTiles, int N) {
    extern __shared__ int counts[];  // [warp][expert]: pairs, then where the next one goes
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const int share = (pairs + kThreads - 1) / kThreads * kWarpSize;  // of a warp
    const int first = warp * share, end = min(pairs, first + share);
    int* own = counts + warp * experts;
    allowNextKernel();
    waitForPriorKernels();
    for (int i = threadIdx.x; i < kWarps * experts; i += kThreads) counts[i] = 0;
    for (int i = threadIdx.x; i < mostTiles * tileTokens; i += kThreads) slots[i] = -1;
    __syncthreads();

    auto expertOf = [&](int pair) {
        const long long expert = pair < end ? chosen[pair] : -1;
        return expert < 0 || expert >= experts ? -1 : int(expert);
    };
    for (int start = first; start < end; start += kBatch * kWarpSize) {
        int batch[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) batch[i] = expertOf(start + i * kWarpSize + lane);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const uint32 equal = equalLanes(batch[i]);
            if (batch[i] >= 0 && __ffs(equal) == lane + 1) own[batch[i]] += __popc(equal);
            __syncwarp();
        }
    }
    __syncthreads();

    if (warp == 0) {
        int tiles = 0;  // of the experts before
        for (int base = 0; base < experts; base += kWarpSize) {
            const int expert = base + lane;
            int total = 0;
            if (expert < experts) {
                for (int w = 0; w < kWarps; ++w) total += counts[w * experts + expert];
            }
            const int ownTiles = (total + tileTokens - 1) / tileTokens;
            int place = ownTiles;  // inclusive sum over lanes
#pragma unroll
            for (int distance = 1; distance < kWarpSize; distance *= 2) {
                const int before = __shfl_up_sync(kFullWarp, place, distance);
                if (lane >= distance) place += before;
            }
            const int added = __shfl_sync(kFullWarp, place, kWarpSize - 1);
            place += tiles - ownTiles;
            if (expert < experts) {
                for (int i = 0; i < ownTiles; ++i) tileExperts[place + i] = expert;
                int next = place * tileTokens;
                for (int w = 0; w < kWarps; ++w) {
                    const int count = counts[w * experts + expert];
                    counts[w * experts + expert] = next;
                    next += count;
                }
            }
            tiles += added;
        }
        if (lane == 0) *tileCount = tiles;
    }
    __syncthreads();

    for (int start = first; start < end; start += kBatch * kWarpSize) {
        int batch[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) batch[i] = expertOf(start + i * kWarpSize + lane);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int pair = start + i * kWarpSize + lane, expert = batch[i];
            const uint32 equal = equalLanes(expert);
            const int next = expert >= 0 ? own[expert] : 0;
            __syncwarp();
            if (expert >= 0) {
                slots[next + __popc(equal & ((1u << lane) - 1))] = pair;
                if (__ffs(equal) == lane + 1) own[expert] = next + __popc(equal);
            } else if (pair < end) {
                for (int n = 0; n < N; ++n) y[size_t(pair) * N + n] = 0;
            }
            __syncwarp();
        }
    }
}
