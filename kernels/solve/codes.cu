// What every step of tuning asks of a weight in binary codes: the codes nearest to the copy of it that is tuned, the
// weight of codes, and the gradient of that weight summed up for scales and offset.
#include "levels.cuh"

namespace {

constexpr int kThreads = QK_SOLVE_THREADS, kWarps = kThreads / kWarpSize;
constexpr int kColumns = QK_CODED_COLUMNS;  // of a group, that a warp takes at most

}  // namespace

// A warp takes a part of a group of a row; the parts of all groups of all rows follow one another. Grid: kWarps parts a
// block.
template <int kBits>
__global__ void __launch_bounds__(kThreads)
bcqNearestCodes(const float* __restrict__ latent,  // [N, K]; null: codes stay
                const float* __restrict__ scales,  // [kBits, N, groups]
                const float* __restrict__ offset,  // [N, groups]
                uint8* __restrict__ codes,         // [N, K]; read where latent is null, else written
                float* __restrict__ weight,        // [N, K]
                int N, int K, int width, int groups, int parts) {
    __shared__ WarpLevels<kBits> tables[kWarps];
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const size_t number = size_t(blockIdx.x) * kWarps + warp, group = number / parts, all = size_t(N) * groups;
    if (group >= all) return;
    const int start = int(group % groups) * width, first = start + int(number % parts) * kColumns;
    const int end = min(K, min(start + width, first + kColumns));
    const size_t row = group / groups * K;
    RowCode<kBits> code;
#pragma unroll
    for (int bit = 0; bit < kBits; ++bit) code.scales[bit] = scales[bit * all + group];
    code.offset = offset[group];
    if (!latent) {
        for (int k = first + lane; k < end; k += kWarpSize) weight[row + k] = code.level(codes[row + k]);
        return;
    }
    WarpLevels<kBits>& table = tables[warp];
    table.make(code, lane);
#pragma unroll 4
    for (int k = first + lane; k < end; k += kWarpSize) {
        const int rank = table.nearest(latent[row + k]);
        codes[row + k] = table.codes[rank];
        weight[row + k] = table.levels[rank];
    }
}

// Sums over a group of the gradient, times the sign of each plane for scales and as it is for the offset. A warp sums up
// a group where `warps` is 1, else a block does; lanes, then warps are added in a fixed order. Grid: kWarps / warps
// groups a block.
template <int kBits>
__global__ void __launch_bounds__(kThreads)
bcqCodeGradients(const float* __restrict__ gradient,  // [N, K], of the weight
                 const uint8* __restrict__ codes,     // [N, K]
                 float* __restrict__ scales,          // [kBits, N, groups]
                 float* __restrict__ offset,          // [N, groups]
                 int N, int K, int width, int groups, int warps) {
    constexpr int kUnknowns = kBits + 1;
    __shared__ float parts[kWarps][kUnknowns];
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const size_t group = (size_t(blockIdx.x) * kWarps + warp) / warps, all = size_t(N) * groups;
    float sums[kUnknowns] = {};
    if (group < all) {
        const int start = int(group % groups) * width, end = min(K, start + width);
        const size_t row = group / groups * K;
#pragma unroll 4
        for (int k = start + warp % warps * kWarpSize + lane; k < end; k += warps * kWarpSize) {
            const uint32 code = codes[row + k] | 1u << kBits;  // the sign of the offset is always +
            const float value = gradient[row + k];
#pragma unroll
            for (int u = 0; u < kUnknowns; ++u) sums[u] += signedBy(value, code, u);
        }
    }
#pragma unroll
    for (int u = 0; u < kUnknowns; ++u) sums[u] = laneSum<1, kWarpSize>(sums[u]);
    if (warps > 1) {
        if (lane == 0) {
#pragma unroll
            for (int u = 0; u < kUnknowns; ++u) parts[warp][u] = sums[u];
        }
        __syncthreads();
#pragma unroll
        for (int u = 0; u < kUnknowns; ++u) {
            sums[u] = 0.0f;
            for (int other = 0; other < warps; ++other) sums[u] += parts[other][u];
        }
    }
    if (group >= all || lane != 0 || warp % warps != 0) return;
#pragma unroll
    for (int u = 0; u < kUnknowns; ++u) (u < kBits ? scales[u * all + group] : offset[group]) = sums[u];
}
