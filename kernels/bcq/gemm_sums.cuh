// How the sums of a fused product become y (gemm.cuh): added over phases and parts in order, finished, written.
#pragma once
#include "gemm.cuh"

// Where the consumers' sums stand, [phase][token][row].
struct SumPlace {
    uint32 start;   // shared address
    int tokens;     // whose sums stand there at once
    int stride;     // floats from a token's to the next one's

    __device__ __forceinline__ uint32 at(int phase, int token, int row) const {
        return start + ((phase * tokens + token) * stride + row) * sizeof(float);
    }
};

// Two neighbouring rows' sum over phases and parts.
template <int kPhases>
__device__ __forceinline__ float2 pairSum(const SumPlace& sums, uint32 parts, int token, int row) {
    float2 sum{};
    for (uint32 part = 0; part < parts; ++part) {
        for (int phase = 0; phase < kPhases; ++phase) {
            const uint32 from = sums.at(phase, token, row);
            const float2 term = parts > 1 ? loadRemote8(from, part) : loadShared8(from);
            sum.x += term.x, sum.y += term.y;
        }
    }
    return sum;
}

// m: row of y.
template <int kDtype>
__device__ __forceinline__ void writeElement(const GemmProblem& p, float sum, int expert, int m, int n) {
    if (p.scaleBits == 8) sum *= rowFactor<8>(p.factors, expert * p.nTiles() + n / kTileN, n % kTileN);
    if (p.bias) sum += shortToFloat(p.bias[size_t(expert) * p.N + n], kDtype);
    const size_t at = size_t(m) * p.N + n;
    const float kept = p.residual ? shortToFloat(p.residual[at], kDtype) : 0.0f;
    p.y[at] = withEpilogue(sum, p.activation, p.residual, kept, kDtype);
}

// Finish the block's share of the rows, for `tokens` tokens from firstToken on. Neighbouring threads have neighbouring
// rows, kSumBatch pairs of them each so that several reads are on their way.
template <class S, int kDtype>
__device__ __forceinline__ void writeTokens(const GemmProblem& p, const WorkItem& item, const BlockWork& work,
                                            const SumPlace& sums, int firstToken, int tokens) {
    constexpr int kPair = 2;
    const int halves = item.nTiles * (kTileN / kPair), firstN = item.nTile * kTileN;
    const int firstRow = int(halves * work.part / work.parts) * kPair;
    const int endRow = min(p.N - firstN, int(halves * (work.part + 1) / work.parts) * kPair);
    const int pairs = (endRow - firstRow + 1) / kPair, count = min(tokens, p.M - firstToken) * pairs;
    const int expert = item.expert(p);
    for (int first = threadIdx.x; first < count; first += kSumBatch * S::kConsumers) {
        float2 sum[kSumBatch];
        int token[kSumBatch], row[kSumBatch];
#pragma unroll
        for (int b = 0; b < kSumBatch; ++b) {
            const int place = min(first + b * S::kConsumers, count - 1);
            token[b] = place / pairs, row[b] = firstRow + (place - token[b] * pairs) * kPair;
            sum[b] = pairSum<S::kPhases>(sums, work.parts, token[b], row[b]);
        }
#pragma unroll
        for (int b = 0; b < kSumBatch; ++b) {
            if (first + b * S::kConsumers >= count) break;
            const int place = firstToken + token[b], m = p.slots ? p.slots[place] : place;
            if (m < 0) continue;
            writeElement<kDtype>(p, sum[b].x, expert, m, firstN + row[b]);
            if (row[b] + 1 < endRow) writeElement<kDtype>(p, sum[b].y, expert, m, firstN + row[b] + 1);
        }
    }
}
