// How the sums of a fused product become y (gemm.cuh): added over blocks and phases in order, finished, written.
#pragma once
#include "gemm.cuh"

// Whether another block has part of the k tiles of this block's item.
template <class S>
__device__ __forceinline__ bool isSplit(const GemmProblem& p) { return S::kPartners == 1 && p.splits > 1; }

// Bytes of the sums that phases leave for the first.
template <class S>
constexpr uint32 kPhaseSums = (S::kPhases - 1) * (S::kConsumers / S::kPhases) * (S::kTokens / 8) * kVectorBytes;

// Add the sums of all phases, in order, to those of the first. start: shared address of where the others leave theirs.
template <class S>
__device__ __forceinline__ void addPhases(float* acc, int phase, uint32 start) {
    constexpr int kThreads = S::kConsumers / S::kPhases, kVectors = S::kTokens / 8;
    const uint32 own = start + threadIdx.x % kThreads * kVectorBytes;
    if (phase > 0) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            const uint32 place = ((phase - 1) * kVectors + i) * kThreads * kVectorBytes;
            storeShared16(own + place, make_uint4(__float_as_uint(acc[4 * i]), __float_as_uint(acc[4 * i + 1]),
                                                  __float_as_uint(acc[4 * i + 2]), __float_as_uint(acc[4 * i + 3])));
        }
    }
    namedSync(1, S::kConsumers);
    if (phase == 0) {
#pragma unroll 1
        for (int other = 0; other < S::kPhases - 1; ++other) {
#pragma unroll
            for (int i = 0; i < kVectors; ++i) {
                const uint4 part = loadShared16(own + (other * kVectors + i) * kThreads * kVectorBytes);
                acc[4 * i] += __uint_as_float(part.x), acc[4 * i + 1] += __uint_as_float(part.y);
                acc[4 * i + 2] += __uint_as_float(part.z), acc[4 * i + 3] += __uint_as_float(part.w);
            }
        }
    }
    namedSync(1, S::kConsumers);  // before the next segment's sums take their place
}

// A warp's sums of an n tile -> y, those that this block finishes. A lane's sums are of two tokens and rows g, g + 8;
// transposed, of one token and neighbouring rows.
template <class S>
__device__ __forceinline__ void writeTile(const float* acc, const GemmProblem& p, int nTile, int firstToken, int lane) {
    constexpr int kDtype = S::kDtype, kHalf = kTileN / kLaneRows;
    const int g = lane / kTileQuads, t = lane % kTileQuads, column = nTile * kTileN + 2 * t;
    const auto finishes = [&](int j) { return !isSplit<S>(p) || S::Splits::finishes(j); };
    const bool even = p.N % 2 == 0;  // two elements are one store
    float factor[kLaneRows], bias[kLaneRows];
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
        const int n = nTile * kTileN + r * kHalf + g;
        factor[r] = p.scaleBits == 8 ? rowFactor<8>(p.factors, nTile, r * kHalf + g) : 1.0f;
        bias[r] = p.bias && n < p.N ? shortToFloat(p.bias[n], kDtype) : 0.0f;
    }
    uint16* y = p.y + size_t(firstToken + g) * p.N + column;
    const int tokens = p.M - firstToken;
#pragma unroll
    for (int j = 0; j < S::kTokens / 8; ++j, y += 8 * size_t(p.N)) {
        if (8 * j >= tokens) break;
        if (!finishes(j)) continue;
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r) {
            const float* sum = acc + 4 * j + 2 * r;
            const uint32 pair = transposed(packPair<kDtype>(sum[0] * factor[r] + bias[r], sum[1] * factor[r] + bias[r]));
            const int left = 8 * j + g < tokens ? p.N - column - r * kHalf : 0;  // columns from this one on
            if (even && left > 0) *reinterpret_cast<uint32*>(y + r * kHalf) = pair;
            if (even) continue;
            if (left > 0) y[r * kHalf] = uint16(pair);
            if (left > 1) y[r * kHalf + 1] = uint16(pair >> 16);
        }
    }
    if (p.activation == kNoActivation && !p.residual) return;
#pragma unroll 1
    for (int m = firstToken + g; m < min(p.M, firstToken + S::kTokens); m += 8) {  // what this lane has written
#pragma unroll 1
        for (int i = 0; i < 2 * kLaneRows; ++i) {
            const int n = column + i / 2 * kHalf + i % 2;
            if (n >= p.N || !finishes((m - firstToken) / 8)) continue;
            const size_t at = size_t(m) * p.N + n;
            const float kept = p.residual ? shortToFloat(p.residual[at], kDtype) : 0.0f;
            p.y[at] = withEpilogue(shortToFloat(p.y[at], kDtype), p.activation, p.residual, kept, kDtype);
        }
    }
}
