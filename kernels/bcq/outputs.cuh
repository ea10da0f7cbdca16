// What the bcq GEMVs are given, and how the sums of a block's n tiles become y: exchanged in a cluster, finished, written.
#pragma once
#include "stages.cuh"
#include "../shared/cluster.cuh"
#include "../shared/epilogue.cuh"

// The parameters of a kernel.
struct Problem {
    const uint4* tiles;     // sign tiles
    const void* scales;     // scale tiles
    const uint16* factors;  // factor tiles, or null with fp16 scales
    const uint16* x;        // [M, K], fp16 or bf16
    const uint16* bias;     // [N] in x's type, or null
    const uint16* residual; // [M, N], added to the result, or null
    uint16* y;              // [M, N], or [M, N / 2] of a gated product
    int M, N, K;
    int groups;             // scale groups per row
    uint32 groupMagic;      // 2^32 over the segments of a group, rounded up; 0 for one
    int entries;            // scales, and one more with an offset
    int passTiles;          // k tiles whose records fit into shared memory at once; whole steps
    int rangeTiles;         // n tiles of a range (a block, or a cluster), one more in the first `longRanges`
    int longRanges;
    int dtype;
    int activation;         // of activation.cuh, or kNoActivation; before the residual is added; or kGated + that of a gate
    int vectors;            // every row of x is 16-byte aligned and K % 8 == 0
    const long long* chosen = nullptr;  // [gridDim.z]: the experts whose bias [experts, N] and row of y a block takes
    int stages = 1;         // of a warp, 1 or 2, in level_loop.cuh
};

// Where a block's bias and results are. Read again behind the product, so that they hold no registers meanwhile.
struct Outputs {
    const uint16* bias;
    uint16* y;
    __device__ __forceinline__ explicit Outputs(const Problem& p) : bias(p.bias), y(p.y) {
        if (!p.chosen) return;
        y += size_t(blockIdx.z) * p.N;
        if (bias) bias += size_t(*static_cast<const volatile long long*>(p.chosen + blockIdx.z)) * p.N;
    }
};

// Of the elements [n tile][row][token] of n tiles, which a block of a cluster adds up: a half, or all. Of a gated product those of
// gates, then those of their ups.
template <int kTokens, bool kGates>
struct OwnElements {
    static constexpr int kTileSums = kTileN * kTokens, kTileGates = kGatedRows * kTokens;
    int count;
    bool gated;

    __device__ __forceinline__ OwnElements(const Problem& p, int nTiles, uint32 blocks)
        : count(pinned(nTiles) * kTileSums >> (blocks - 1)), gated(kGates && isGated(p.activation)) {}
    // Which element the i-th of a block is.
    __device__ __forceinline__ int at(uint32 rank, int i) const {
        if (!gated) return rank * count + i;
        const int half = count / 2, upper = i >= half, gate = rank * half + i - upper * half;
        return gate / kTileGates * kTileSums + upper * kTileGates + gate % kTileGates;
    }
};

// The end of a gated product. sumOf(i): what the i-th of the block's elements adds up to in all blocks.
template <class Product, int kThreads, class SumOf>
__device__ __forceinline__ void finishGated(const Problem& p, const OwnElements<Product::kTokens, true>& own, uint32 rank, int firstNTile,
                                           int firstToken, SumOf sumOf) {
    constexpr int kTokens = Product::kTokens, kTileSums = kTileN * kTokens;
    const Outputs out(p);
    const int half = own.count / 2;
#pragma unroll 1
    for (int i = threadIdx.x; i < half; i += kThreads) {
        const int element = own.at(rank, i), nTile = firstNTile + element / kTileSums, row = element % kTileSums / kTokens;
        const int n = nTile * kGatedRows + row, m = firstToken + element % kTokens;
        float value[2];
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
            const int ownRow = row + upper * kGatedRows, whole = nTile * kTileN + ownRow;
            value[upper] = sumOf(i + upper * half) * rowFactor<Product::kScaleBits>(p.factors, nTile, ownRow);
            if (out.bias && whole < p.N) value[upper] += shortToFloat(out.bias[whole], p.dtype);
        }
        if (n >= p.N / 2 || m >= p.M) continue;  // records of tokens behind the last were never made
        out.y[size_t(m) * (p.N / 2) + n] = gatedElement(value[0], value[1], p.dtype);
    }
}

// What is left when the sums of a block's n tiles are there: blocks of a cluster exchange theirs, y is written. blockSum(i):
// what element i [n tile][row][token] adds up to in this block. received: shared memory for the other block's. kGates: whether
// products may be gated, which some kernels' registers do not carry.
template <class Product, int kThreads, bool kGates = false, class BlockSum>
__device__ __forceinline__ void finishTiles(const Problem& p, int firstNTile, int nTiles, int firstToken, Mailbox& mailbox,
                                            float* received, BlockSum blockSum) {
    constexpr int kTokens = Product::kTokens, kTileSums = kTileN * kTokens;
    // Each block of a cluster adds up half of the elements, and gets the other block's part of them. Values are read or
    // computed again here, so that they take no register before.
    const uint32 blocks = clusterBlocks(), rank = clusterRank();
    const OwnElements<kTokens, kGates> own(p, nTiles, blocks);
    if (blocks > 1) {
        mailbox.waitForOthers();
        if (threadIdx.x == 0) mailbox.expect(own.count * sizeof(float));
#pragma unroll 1
        for (int i = threadIdx.x; i < own.count; i += kThreads) {
            mailbox.send(sharedAddress(received + i), blockSum(own.at(rank ^ 1, i)), rank ^ 1);
        }
    }
    if constexpr (kGates) {
        if (own.gated) {
            if (blocks > 1) mailbox.receive();
            finishGated<Product, kThreads>(p, own, rank, firstNTile, firstToken, [&](int i) {
                const float sum = blockSum(own.at(rank, i));
                return blocks > 1 ? sum + received[i] : sum;
            });
            return;
        }
    }
    const Outputs out(p);
    for (int i = threadIdx.x; i < own.count; i += kThreads) {
        const int place = rank * own.count + i, nTile = place / kTileSums, element = place % kTileSums;
        const int n = (firstNTile + nTile) * kTileN + element / kTokens, m = firstToken + element % kTokens;
        const bool inside = n < p.N && m < p.M;  // records of tokens behind the last were never made
        const size_t output = size_t(m) * p.N + n;
        const float shift = inside && out.bias ? shortToFloat(out.bias[n], p.dtype) : 0.0f;
        const float addend = inside && p.residual ? shortToFloat(p.residual[output], p.dtype) : 0.0f;
        float value = blockSum(place);
        if (blocks > 1) {
            mailbox.receive();  // what is sent is waited for, by some thread at least, also where all is outside
            value += received[i];
        }
        if (!inside) continue;
        value *= rowFactor<Product::kScaleBits>(p.factors, firstNTile + nTile, element / kTokens);
        out.y[output] = withEpilogue(out.bias ? value + shift : value, p.activation, p.residual, addend, p.dtype);
    }
}
