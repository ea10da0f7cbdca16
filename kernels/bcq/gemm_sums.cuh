// How the sums of a fused product become y (gemm.cuh): added over blocks and phases in order, finished, written.
#pragma once
#include "gemm.cuh"

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

// Two neighbouring elements of y, `pair` before the epilogue, from column n of row m on.
template <int kDtype>
__device__ __forceinline__ void writePair(const GemmProblem& p, uint32 pair, int m, int n) {
    uint16* y = p.y + size_t(m) * p.N + n;
    if (p.N % 2 == 0) {
        *reinterpret_cast<uint32*>(y) = pair;
    } else {
        y[0] = uint16(pair);
        if (n + 1 < p.N) y[1] = uint16(pair >> 16);
    }
}

// A warp's sums of an n tile -> y. A lane's sums are of two tokens and rows g, g + 8; transposed, of one token and
// neighbouring rows.
template <class S>
__device__ __forceinline__ void writeTile(const float* acc, const GemmProblem& p, int nTile, int firstToken, int lane) {
    constexpr int kDtype = S::kDtype, kHalf = kTileN / kLaneRows;
    const int g = lane / kTileQuads, t = lane % kTileQuads, column = nTile * kTileN + 2 * t;
    float factor[kLaneRows], bias[kLaneRows];
#pragma unroll
    for (int r = 0; r < kLaneRows; ++r) {
        const int n = nTile * kTileN + r * kHalf + g;
        factor[r] = p.scaleBits == 8 ? rowFactor<8>(p.factors, nTile, r * kHalf + g) : 1.0f;
        bias[r] = p.bias && n < p.N ? shortToFloat(p.bias[n], kDtype) : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < S::kTokens / 8; ++j) {
        if (firstToken + 8 * j >= p.M) break;
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r) {
            const float* sum = acc + 4 * j + 2 * r;
            const uint32 pair = transposed(packPair<kDtype>(sum[0] * factor[r] + bias[r], sum[1] * factor[r] + bias[r]));
            const int m = firstToken + 8 * j + g, n = column + r * kHalf;
            if (m < p.M && n < p.N) writePair<kDtype>(p, pair, m, n);
        }
    }
    if (p.activation == kNoActivation && !p.residual) return;
#pragma unroll 1
    for (int m = firstToken + g; m < min(p.M, firstToken + S::kTokens); m += 8) {  // what this lane has written
#pragma unroll 1
        for (int i = 0; i < 2 * kLaneRows; ++i) {
            const int n = column + i / 2 * kHalf + i % 2;
            if (n >= p.N) continue;
            const size_t at = size_t(m) * p.N + n;
            const float kept = p.residual ? shortToFloat(p.residual[at], kDtype) : 0.0f;
            p.y[at] = withEpilogue(shortToFloat(p.y[at], kDtype), p.activation, p.residual, kept, kDtype);
        }
    }
}
