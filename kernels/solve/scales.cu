// What a refit of scales against the Hessian takes besides products: the planes of a group as numbers, the small systems
// of its rows, and what is left of a weight.
//
//   B [U, g]  planes (+-1) of a row's group, and ones where there is an offset        N = B H_gg B^T
//   (N + pull I) d = B p         p [g]: (R H) of the group, R = W - W' of the whole row         scales += d
//
// The sums of a row's group are those of one warp: every lane adds up its columns, lanes are added in a fixed order.
#include "levels.cuh"
#include "systems.cuh"

namespace {

constexpr int kThreads = QK_SOLVE_THREADS, kWarps = kThreads / kWarpSize;
constexpr float kTiny = 1.17549435e-38f;  // the smallest normal number
constexpr float kMostScale = QK_MOST_SCALE_CODE, kMostOffset = QK_MOST_OFFSET_CODE;

__device__ __forceinline__ float clamped(float value, float low, float high) { return fminf(fmaxf(value, low), high); }

}  // namespace

// Grid: (N, tiles of kThreads columns). basis[n, u, k] = +-1 by bit u of the code; ones for the offset.
template <int kBits, bool kOffset>
__global__ void __launch_bounds__(kThreads)
bcqSigns(const uint8* __restrict__ codes,  // [N, g] codeStride apart
         float* __restrict__ basis,        // [N, U, g]
         int g, int codeStride) {
    constexpr int kUnknowns = kBits + kOffset;
    const int column = blockIdx.y * kThreads + threadIdx.x;
    if (column >= g) return;
    const uint32 code = codes[size_t(blockIdx.x) * codeStride + column];
    float* own = basis + size_t(blockIdx.x) * kUnknowns * g + column;
#pragma unroll
    for (int bit = 0; bit < kBits; ++bit) own[size_t(bit) * g] = signedBy(1.0f, code, bit);
    if (kOffset) own[size_t(kBits) * g] = 1.0f;
}

// Grid: (N, tiles of kThreads columns). residual = weight - level of each code.
template <int kBits>
__global__ void __launch_bounds__(kThreads)
bcqResidual(const float* __restrict__ weight,  // [N, K]
            const uint8* __restrict__ codes,   // [N, K]
            const float* __restrict__ scales,  // [kBits, N, groups]
            const float* __restrict__ offset,  // [N, groups]
            float* __restrict__ residual,      // [N, K]
            int N, int K, int width, int groups) {
    const int column = blockIdx.y * kThreads + threadIdx.x;
    if (column >= K) return;
    const size_t at = size_t(blockIdx.x) * K + column, group = size_t(blockIdx.x) * groups + column / width;
    float level = 0.0f;
#pragma unroll
    for (int bit = 0; bit < kBits; ++bit) {
        level += signedBy(scales[size_t(bit) * N * groups + group], codes[at], bit);
    }
    residual[at] = weight[at] - (level + offset[group]);
}

// One step for one group of every row; a row per warp. With factors, what 8-bit scales of a row count in, the scales are
// rounded one by one, the last first, each where the loss has its minimum given those rounded before it (Babai's nearest
// plane); negative ones turn the bits of their plane. Without, they are rounded to fp16.
template <int kBits, bool kOffset>
__global__ void __launch_bounds__(kThreads, 2)
bcqRefitScales(const float* __restrict__ products,  // [N, U, g]: B H_gg
               const float* __restrict__ pressure,  // [N, g] pressureStride apart
               const float* __restrict__ factors,   // [N], or null
               uint8* __restrict__ codes,           // [N, g] codeStride apart, read and written
               float* __restrict__ scales,          // [kBits] planeStride apart, [N] rowStride apart; likewise
               float* __restrict__ offset,          // [N] rowStride apart; likewise
               float* __restrict__ change,          // [N, g]: what the levels of the codes moved by
               int N, int g, int pressureStride, int codeStride, int planeStride, int rowStride, float proximal) {
    constexpr int kUnknowns = kBits + kOffset;
    const int lane = threadIdx.x % kWarpSize, row = blockIdx.x * kWarps + threadIdx.x / kWarpSize;
    if (row >= N) return;
    uint8* own = codes + size_t(row) * codeStride;
    float sums[kUnknowns][kUnknowns] = {}, rightSums[kUnknowns] = {};
    for (int k = lane; k < g; k += kWarpSize) {
        const uint32 code = own[k] | 1u << kBits;  // the sign of the offset is always +
        const float p = pressure[size_t(row) * pressureStride + k];
#pragma unroll
        for (int u = 0; u < kUnknowns; ++u) {
            const float product = products[(size_t(row) * kUnknowns + u) * g + k];
            rightSums[u] += signedBy(p, code, u);
#pragma unroll
            for (int v = u; v < kUnknowns; ++v) sums[u][v] += signedBy(product, code, v);
        }
    }
    double normal[kUnknowns][kUnknowns], step[kUnknowns], trace = 0.0;
#pragma unroll
    for (int u = 0; u < kUnknowns; ++u) {
        step[u] = laneSum<1, kWarpSize>(rightSums[u]);
#pragma unroll
        for (int v = u; v < kUnknowns; ++v) normal[u][v] = laneSum<1, kWarpSize>(sums[u][v]);
        trace += normal[u][u];
    }
#pragma unroll
    for (int u = 0; u < kUnknowns; ++u) normal[u][u] += double(proximal) * (trace / kUnknowns) + double(kTiny);
    solvePositive<kUnknowns>(normal, step);

    float* ownScales = scales + size_t(row) * rowStride;
    float* ownOffset = offset + size_t(row) * rowStride;
    float before[kUnknowns], after[kUnknowns], wanted[kUnknowns];
    const float factor = factors ? factors[row] : 1.0f;
#pragma unroll
    for (int u = kUnknowns - 1; u >= 0; --u) {
        before[u] = u < kBits ? ownScales[size_t(u) * planeStride] : *ownOffset;
        wanted[u] = before[u] + float(step[u]);
        if (!factors) {
            after[u] = halfToFloat(floatToHalf(wanted[u]));
            continue;
        }
        float best = wanted[u];
#pragma unroll
        for (int v = u + 1; v < kUnknowns; ++v) best += (wanted[v] - after[v]) * float(normal[u][v] / normal[u][u]);
        const float count = u < kBits ? clamped(rintf(fabsf(best) / factor), 0.0f, kMostScale)
                                      : clamped(rintf(best / factor), -kMostOffset, kMostOffset);
        after[u] = u < kBits ? copysignf(count * factor, best) : count * factor;
    }
    uint32 turned = 0;
    if (factors) {
#pragma unroll
        for (int u = 0; u < kBits; ++u) turned |= uint32(after[u] < 0.0f) << u;
    }
    for (int k = lane; k < g; k += kWarpSize) {
        const uint32 code = own[k] | 1u << kBits;
        float moved = 0.0f;
#pragma unroll
        for (int u = 0; u < kUnknowns; ++u) moved += signedBy(after[u] - before[u], code, u);
        change[size_t(row) * g + k] = moved;
        own[k] = uint8((code ^ turned) & ((1u << kBits) - 1));
    }
    __syncwarp();  // every lane has read the scales
    if (lane == 0) {
#pragma unroll
        for (int u = 0; u < kBits; ++u) ownScales[size_t(u) * planeStride] = turned >> u & 1 ? -after[u] : after[u];
        if (kOffset) *ownOffset = after[kUnknowns - 1];
    }
}
