// How the sums of a fused product of experts become y (experts_gemm.cuh): added over phases and parts in order, finished,
// written.
#pragma once
#include "experts_gemm.cuh"
#include "gemm_tile.cuh"

constexpr int kChunkTokens = QK_EXPERTS_CHUNK_TOKENS, kSumPadding = QK_EXPERTS_SUM_PADDING;  // see sums; floats behind a token's
constexpr int kSumBatch = 4;  // pairs of sums that a thread reads at once

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
__device__ __forceinline__ void writeElement(const ExpertsProblem& p, float sum, int expert, int m, int n) {
    if (p.scaleBits == 8) sum *= rowFactor<8>(p.factors, expert * p.nTiles() + n / kTileN, n % kTileN);
    if (p.bias) sum += shortToFloat(p.bias[size_t(expert) * p.N + n], kDtype);
    const size_t at = size_t(m) * p.N + n;
    p.y[at] = floatToShort(sum, kDtype);
}

// Finish the block's share of the rows, for `tokens` tokens from firstToken on. Neighbouring threads have neighbouring
// rows, kSumBatch pairs of them each so that several reads are on their way.
template <class S>
__device__ __forceinline__ void writeTokens(const ExpertsProblem& p, const WorkItem& item, const ExpertsWork& work,
                                            const SumPlace& sums, int firstToken, int tokens) {
    constexpr int kPair = 2;
    const int halves = item.nTiles * (kTileN / kPair), firstN = item.nTile * kTileN;
    const int firstRow = int(halves * work.part / work.parts) * kPair;
    const int endRow = min(p.N - firstN, int(halves * (work.part + 1) / work.parts) * kPair);
    const int pairs = (endRow - firstRow + 1) / kPair, count = min(tokens, p.M - firstToken) * pairs;
    const int expert = p.expert(item);
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
            writeElement<S::kDtype>(p, sum[b].x, expert, m, firstN + row[b]);
            if (row[b] + 1 < endRow) writeElement<S::kDtype>(p, sum[b].y, expert, m, firstN + row[b] + 1);
        }
    }
}

// Turn the consumers' sums of an item into y.
template <class S>
__device__ __forceinline__ void finishItem(const float* acc, const ExpertsProblem& p, const Consumer& own,
                                           const WorkItem& item, const ExpertsWork& work, uint32 start) {
    constexpr int kSumTokens = S::kTokens < kChunkTokens ? S::kTokens : kChunkTokens;  // whose sums leave together
    const bool shared = work.parts > 1;
    const SumPlace sums{start, shared ? S::kTokens : kSumTokens, S::kRowGroups * kGroupWarps * kTileN + kSumPadding};
    const int row = own.tile * kTileN + own.lane / kTileQuads, firstToken = item.tokenTile * S::kTokens;
    if (shared) namedSync(1, S::kConsumers);  // x and the rings are read, and the sums take their place
#pragma unroll 1
    for (int chunk = 0; chunk < S::kTokens; chunk += kSumTokens) {
#pragma unroll
        for (int i = 0; i < S::kTokens / 2; ++i) {  // registers have no index
            if (i / (kSumTokens / 2) * kSumTokens != chunk) continue;
            const int token = i / 4 * 8 + 2 * (own.lane % kTileQuads) + i % 2 - (shared ? 0 : chunk);
            storeShared4(sums.at(own.phase, token, row + i / 2 % 2 * (kTileN / 2)), __float_as_uint(acc[i]));
        }
        if (shared) continue;
        namedSync(1, S::kConsumers);
        writeTokens<S>(p, item, work, sums, firstToken + chunk, kSumTokens);
        namedSync(1, S::kConsumers);
    }
    if (!shared) return;
    clusterSync();
    writeTokens<S>(p, item, work, sums, firstToken, S::kTokens);
    clusterSync();  // the other block has read this one's sums
}
