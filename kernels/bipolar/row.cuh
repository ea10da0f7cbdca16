// A row of x to its codes, their sum and their step: what a block of the quantizers does. Formulas: quantize.cu.
#pragma once
#include "codes.cuh"

struct QuantizedRows {
    uint8* tiles;  // [ceil(M/64), k tiles, planes, 64, 128]
    int* sums;     // [M] of codes; with zero points then [M] of 2 z
    float* steps;  // [M]
    int M, K, limit, perToken;
};

// kPlanes: act bits, or 0 for one plane of bytes of any width. load: a lane's columns of the stretch that begins at this
// column. A warp loads its stretches one after the other, for how far they reach, and then those before the last once more.
// One loop has all of it: written out, a rotation takes 20 KiB of instructions for each place that loads.
template <int kPlanes, bool kZero, class Load>
__device__ __forceinline__ void quantizeRow(const Load& load, float clip, const QuantizedRows& p) {
    constexpr bool kBytes = kPlanes == 0;
    constexpr int kTileColumns = kBytes ? kLineBytes : kBitsPerLine;
    constexpr uint32 kOnes = 0x01010101u;
    __shared__ uint2 reaches[kMaxWarps];
    __shared__ uint32 totals[kMaxWarps];
    const int warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int limit = kBytes ? p.limit : (1 << kPlanes) - 1, rowInBlock = blockIdx.x % kBlockRows;
    const size_t tileBytes = size_t(kBytes ? 1 : kPlanes) * kPlaneBytes;
    uint8* block = p.tiles + blockIdx.x / kBlockRows * ((p.K + kTileColumns - 1) / kTileColumns) * tileBytes;
    const int first = warp * kBitsPerLine, stride = warps * kBitsPerLine;  // in columns

    Reach<kZero> reach;
    Coder<kZero> coder;
    float step = 0.f;
    uint32 sum = 0;
#pragma unroll 1
    for (int stretch = first, last = p.K; stretch < last; stretch += stride) {  // last: p.K until all have been loaded once
        const auto own = load(stretch);
        if (last == p.K) {
            reach.add(own);
            if (stretch + stride < p.K) continue;
            reach.ofBlock(reaches, warps);
            const float above = __fmul_rn(__uint_as_float(reach.above), clip);
            const float below = __fmul_rn(__uint_as_float(reach.below), clip);
            const float range = kZero ? __fadd_rn(above, below) : p.perToken ? above : clip;
            step = __fdiv_rn(range, float(kZero ? 2 * limit : limit));
            coder = Coder<kZero>(step, below, limit, reach.peak());
        }
        uint32 codes[kWords];
        encode(own, coder, codes);
        if (stretch + kBitsPerLine > p.K) clearBehind(codes, stretch + lane * kRun, p.K);
#pragma unroll
        for (int w = 0; w < kWords; w++) sum = __dp4a(codes[w], kOnes, sum);
        if constexpr (kBytes) {
            storeBytes(codes, block, rowInBlock, stretch, p.K);
        } else {
            storePlanes<kPlanes>(codes, block + stretch / kBitsPerLine * tileBytes, rowInBlock, lane);
        }
        if (last == p.K) last = stretch, stretch = first - stride;  // those before this one follow
    }
    sum = blockSum(sum, totals, warps);
    if (threadIdx.x == 0) {
        p.sums[blockIdx.x] = int(sum);
        p.steps[blockIdx.x] = step;
        if constexpr (kZero) p.sums[size_t(p.M) + blockIdx.x] = int(coder.middle);
    }
}
