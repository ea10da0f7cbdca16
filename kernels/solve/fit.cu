// Scales (and offset) of least weighted squared error for each group by itself, a group per warp.
//
// Two starts, round-to-nearest in the clipped range of least error and the greedy one (Guo et al. 2017); from either,
// nearest levels and refitted scales in turn (Xu et al. 2018, algorithm 2), until a round lowers the error by less than
// a share of it. The better result counts. Rounds of a group follow one another; groups are independent, so none waits
// for another to be done. Levels of a group are in shared memory; values are read again in every round, from L1.
#include "levels.cuh"
#include "systems.cuh"

namespace {

constexpr int kThreads = QK_SOLVE_THREADS, kWarps = kThreads / kWarpSize;
constexpr float kSmallestScale = 1.0f / (1 << 24);  // the smallest positive fp16 number

__device__ __forceinline__ float warpSum(float value) { return laneSum<1, kWarpSize>(value); }

__device__ __forceinline__ float half(float value) { return halfToFloat(floatToHalf(value)); }

// What one pass over a group's values gives, for the nearest levels: the weighted squared error, and the sums that the
// next refit needs, sum w b_u b_v (u < v) and sum w x b_u.
template <int kUnknowns>
struct Sums {
    float error, products[kUnknowns][kUnknowns], right[kUnknowns];
};

template <int kBits, bool kOffset>
struct Group {
    static constexpr int kLevels = 1 << kBits, kUnknowns = kBits + kOffset;
    const float* values;      // [g]
    const float* importance;  // [g]
    int g, lane;
    float mass;               // sum of the importance
    WarpLevels<kBits>* table;

    // The code as the format stores it: scales positive and falling, in fp16.
    __device__ __forceinline__ RowCode<kBits> stored(RowCode<kBits> code) const {
#pragma unroll
        for (int i = 0; i < kBits; ++i) code.scales[i] = half(fabsf(code.scales[i]));
#pragma unroll
        for (int pass = 0; pass < kBits; ++pass) {  // neighbours swap, even and odd pairs in turn
#pragma unroll
            for (int i = pass % 2; i + 1 < kBits; i += 2) {
                const float a = code.scales[i], b = code.scales[i + 1];
                code.scales[i] = fmaxf(a, b);
                code.scales[i + 1] = fminf(a, b);
            }
        }
        code.offset = half(code.offset);
        return code;
    }

    __device__ __forceinline__ Sums<kUnknowns> pass() const {
        Sums<kUnknowns> sums = {};
        for (int k = lane; k < g; k += kWarpSize) {
            const float value = values[k], weight = importance[k];
            const int rank = table->nearest(value);
            const uint32 code = table->codes[rank] | 1u << kBits;  // the sign of the offset is always +
            const float difference = table->levels[rank] - value;
            sums.error += difference * difference * weight;
#pragma unroll
            for (int u = 0; u < kUnknowns; ++u) {
                sums.right[u] += signedBy(weight * value, code, u);
#pragma unroll
                for (int v = u + 1; v < kUnknowns; ++v) {
                    sums.products[u][v] += signedBy(signedBy(weight, code, u), code, v);
                }
            }
        }
        sums.error = warpSum(sums.error);
#pragma unroll
        for (int u = 0; u < kUnknowns; ++u) {
            sums.right[u] = warpSum(sums.right[u]);
#pragma unroll
            for (int v = u + 1; v < kUnknowns; ++v) sums.products[u][v] = warpSum(sums.products[u][v]);
        }
        __syncwarp();  // all have read the tables
        return sums;
    }

    // The normal equations, with a pull towards the last code that makes those of equal planes solvable.
    __device__ __forceinline__ RowCode<kBits> refitted(Sums<kUnknowns> sums, const RowCode<kBits>& last,
                                                       float proximal) const {
        const float pull = proximal * mass;
#pragma unroll
        for (int u = 0; u < kUnknowns; ++u) {
            sums.products[u][u] = mass + pull;
            sums.right[u] += pull * (u < kBits ? last.scales[u] : last.offset);
        }
        solvePositive<kUnknowns>(sums.products, sums.right);
        RowCode<kBits> code;
#pragma unroll
        for (int u = 0; u < kBits; ++u) code.scales[u] = sums.right[u];
        code.offset = kOffset ? sums.right[kUnknowns - 1] : last.offset;
        return code;
    }

    // Alternates from a start; returns the least error seen and puts its code in place of the start.
    __device__ __forceinline__ float alternate(RowCode<kBits>& code, int rounds, float proximal, float goingOn) const {
        RowCode<kBits> current = stored(code), best = current;
        table->make(current, lane);
        Sums<kUnknowns> sums = pass();
        float least = sums.error;
        for (int round = 0; round < rounds; ++round) {
            current = stored(refitted(sums, current, proximal));
            table->make(current, lane);
            sums = pass();
            const bool goesOn = sums.error < least * goingOn;
            if (sums.error < least) {
                best = current;
                least = sums.error;
            }
            if (!goesOn) break;  // all lanes have the same sums
        }
        code = best;
        return least;
    }

    // The uniform grid of least error over ranges clipped to 1, 1 - 1 / clipSteps, ...; see fit_uniform.
    __device__ __forceinline__ RowCode<kBits> uniform(int clips, int clipSteps) const {
        constexpr float kTop = kLevels - 1;
        float high = values[0], low = high;
        for (int k = lane; k < g; k += kWarpSize) {
            high = fmaxf(high, values[k]);
            low = fminf(low, values[k]);
        }
#pragma unroll
        for (int mask = 1; mask < kWarpSize; mask *= 2) {
            high = fmaxf(high, __shfl_xor_sync(kFullWarp, high, mask));
            low = fminf(low, __shfl_xor_sync(kFullWarp, low, mask));
        }
        if (!kOffset) {
            high = fmaxf(high, -low);
            low = -high;
        }
        const float offset = half((high + low) / 2);
        float bestStep = 0.0f, least = 0.0f;
        for (int clip = 0; clip < clips; ++clip) {
            const float width = (high - low) * float(1.0 - double(clip) / clipSteps);
            const float step = fmaxf(half(width / (2 * kTop)), kSmallestScale), inverse = 0.5f / step;
            float error = 0.0f;
            for (int k = lane; k < g; k += kWarpSize) {
                const float code = clamped(rintf((values[k] - offset) * inverse + kTop / 2), 0.0f, kTop);
                const float difference = (code * 2 - kTop) * step + offset - values[k];
                error += difference * difference * importance[k];
            }
            error = warpSum(error);
            if (clip == 0 || error < least) {
                least = error;
                bestStep = step;
            }
        }
        RowCode<kBits> code;
#pragma unroll
        for (int i = 0; i < kBits; ++i) code.scales[i] = bestStep * (1 << i);
        code.offset = offset;
        return code;
    }

    // Plane after plane on what the planes before left over: sign, then weighted mean of the size.
    __device__ __forceinline__ RowCode<kBits> greedy() const {
        RowCode<kBits> code;
        code.offset = 0.0f;
        if (kOffset) {
            float sum = 0.0f;
            for (int k = lane; k < g; k += kWarpSize) sum += values[k] * importance[k];
            code.offset = warpSum(sum) / mass;
        }
#pragma unroll
        for (int bit = 0; bit < kBits; ++bit) {
            float sum = 0.0f;
            for (int k = lane; k < g; k += kWarpSize) {
                float residual = values[k] - code.offset;
#pragma unroll
                for (int before = 0; before < bit; ++before) {
                    residual -= residual >= 0.0f ? code.scales[before] : -code.scales[before];
                }
                sum += fabsf(residual) * importance[k];
            }
            code.scales[bit] = warpSum(sum) / mass;
        }
        return code;
    }

    __device__ __forceinline__ static float clamped(float value, float low, float high) {
        return fminf(fmaxf(value, low), high);
    }
};

}  // namespace

// Grid: kWarps groups a block. A group of values that are all equal, or of any width, is a group like others.
template <int kBits, bool kOffset>
__global__ void __launch_bounds__(kThreads, 2)
bcqFitGroups(const float* __restrict__ values,      // [groups, g]
             const float* __restrict__ importance,  // [groups, g], positive
             float* __restrict__ scales,            // [kBits, groups]
             float* __restrict__ offset,            // [groups]; 0 without kOffset
             int groups, int g, int rounds, int clips, int clipSteps, float proximal, float goingOn) {
    __shared__ WarpLevels<kBits> tables[kWarps];
    const int warp = threadIdx.x / kWarpSize, number = blockIdx.x * kWarps + warp;
    if (number >= groups) return;
    Group<kBits, kOffset> group;
    group.values = values + size_t(number) * g;
    group.importance = importance + size_t(number) * g;
    group.g = g;
    group.lane = threadIdx.x % kWarpSize;
    group.table = &tables[warp];
    float mass = 0.0f;
    for (int k = group.lane; k < g; k += kWarpSize) mass += group.importance[k];
    group.mass = warpSum(mass);

    RowCode<kBits> first = group.uniform(clips, clipSteps), second = group.greedy();
    const float error = group.alternate(first, rounds, proximal, goingOn);
    const float other = group.alternate(second, rounds, proximal, goingOn);
    if (group.lane == 0) {
#pragma unroll
        for (int i = 0; i < kBits; ++i) {
            scales[size_t(i) * groups + number] = other < error ? second.scales[i] : first.scales[i];
        }
        offset[number] = other < error ? second.offset : first.offset;
    }
}
