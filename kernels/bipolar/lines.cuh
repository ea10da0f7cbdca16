// What the epilogue needs to know of the rows of a tile, brought to shared memory by warps that do not multiply.
#pragma once
#include "epilogue.cuh"
#include "scales.cuh"

struct LineProblem {
    const int* xSums;
    const int* wSums;
    const float* xSteps;
    const uint16* wScales;
    const void* bias;
    int M, N, K;
    Widths widths;  // with zero points the limit of activations is 1, see twiceZero
    bool zero;
};

// Rows behind the last take the last one's line: no result of theirs is stored, and loads without a condition overlap.
template <bool kSmall, bool kZero>
__device__ __forceinline__ LineOf<kZero> tokenLine(const LineProblem& p, int row) {
    row = min(row, p.M - 1);
    LineOf<kZero> line{tokenTerm(p.xSums[row], p.widths) + (kSmall ? kSmallBits : 0), p.xSteps[row], 0.f};
    if constexpr (kZero) {
        const int found = p.xSums[p.zero ? size_t(p.M) + row : size_t(row)];  // behind no branch: loads overlap
        line.twiceZero = p.zero ? found : 1;
    }
    return line;
}

template <bool kZero>
__device__ __forceinline__ LineOf<kZero> featureLine(const LineProblem& p, int row, int dtype) {
    row = min(featureOfRow(row), p.N - 1);
    return LineOf<kZero>{featureTerm(p.wSums[row], p.widths, p.K), weightScale(p.wScales[row], p.widths),
                         p.bias == nullptr ? 0.f : loadElement(p.bias, row, dtype)};
}

// The lines of one tile, by kThreads threads: one warp for the tokens, the others for the features.
template <bool kSmall, int kTokens, int kFeatures, int kThreads, bool kZero>
__device__ __forceinline__ void loadLines(const LineProblem& p, LineOf<kZero>* tokens, LineOf<kZero>* features, int m,
                                          int n, int thread, int dtype) {
    constexpr int kTokenThreads = kWarpSize, kFeatureThreads = kThreads - kTokenThreads;
    static_assert(kTokens % kTokenThreads == 0, "every lane loads as many tokens");
    if (thread < kTokenThreads) {
#pragma unroll 4  // as many as the producer's registers hold
        for (int c = 0; c < kTokens / kTokenThreads; c++) {
            const int i = c * kTokenThreads + thread;
            tokens[i] = tokenLine<kSmall, kZero>(p, m + i);
        }
    } else {
#pragma unroll 4  // as many as the producer's registers hold
        for (int c = 0; c < (kFeatures + kFeatureThreads - 1) / kFeatureThreads; c++) {
            const int i = c * kFeatureThreads + thread - kTokenThreads;
            if (kFeatures % kFeatureThreads == 0 || i < kFeatures) features[i] = featureLine<kZero>(p, n + i, dtype);
        }
    }
}
