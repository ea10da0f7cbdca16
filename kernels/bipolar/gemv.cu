// bipolarGemv: y[M, N] = x W^T + bias for few tokens, on the binary tensor cores of any GPU from sm_80 on.
//
// Weight bits are read once and multiplied as they lie: mma m16n8k256 takes 16 features x 256 columns of one weight
// plane as A, and one (token, plane) pair per column of B. The k-th bits of A and B only have to be the same columns
// of the matrices, so a lane hands over the 16-byte chunks it loads, in whatever order.
//
//   grid: (ceil(N / 32) * 2, token groups); block: kWarps warps, warp w takes halves of k tiles w, w + kWarps, ...
//   column of B: token * actBits + plane; kGroups * 8 columns per block
//
// Scale codes (kCoded): a line of 128 columns has its own. A chunk of a plane holds a line, so four lanes exchange the words of
// their four chunks; then all hold a quarter of the same line, for m16n8k128. Values are 2 u - (2^p - 1): what is subtracted
// takes one product of bytes, scale codes by the counts of the lines' bits of x.
//
// kZero: tokens have zero points. Integer sums in a fixed order: results repeat bit for bit. Layouts and formula:
// planes.cuh.
#include "scales.cuh"
#include "../shared/mma.cuh"

constexpr int kWarps = QK_GEMV_WARPS;
constexpr int kRows = QK_GEMV_ROWS;          // of A
constexpr int kPairColumns = QK_GEMV_PAIRS;  // of B
constexpr int kHalfChunks = 4;               // chunks per half line: one per t

// A lane's lines of x: that of column g of every group.
template <int kGroups>
struct PairLines {
    const uint8* line[kGroups];  // in k tile 0, or null where there is no token
    int swizzle[kGroups], actBits;

    // tokens: of a block, from the first one on.
    __device__ __forceinline__ PairLines(const uint8* xTiles, int firstToken, int tokens, int M, int kTiles, int actBits, int g)
        : actBits(actBits) {
#pragma unroll
        for (int n = 0; n < kGroups; n++) {
            const int column = n * kPairColumns + g, token = firstToken + column / actBits;
            const bool used = column < tokens * actBits && token < M;
            line[n] = used ? xTiles + lineOffset(token, 0, kTiles, column % actBits, actBits) : nullptr;
            swizzle[n] = token % 8;
        }
    }
    __device__ __forceinline__ uint4 chunk(int n, int kTile, int chunk) const {
        if (line[n] == nullptr) return make_uint4(0, 0, 0, 0);
        return *reinterpret_cast<const uint4*>(line[n] + size_t(kTile) * actBits * kPlaneBytes + chunkOffset(chunk, swizzle[n]));
    }
};

// Chunk t of four lanes to word t of each of the four chunks.
__device__ __forceinline__ void exchange(uint4 chunk, uint32 (&words)[kHalfChunks]) {
    words[0] = chunk.x, words[1] = chunk.y, words[2] = chunk.z, words[3] = chunk.w;
    transposeWords(words);
}

// The products of a half line of every plane join the sums, of codes.
template <int kWeightBits, int kGroups>
__device__ __forceinline__ void addHalf(int (&total)[kGroups][4], const uint4 (&upper)[kWeightBits],
                                        const uint4 (&lower)[kWeightBits], const uint4 (&x)[kGroups]) {
#pragma unroll
    for (int n = 0; n < kGroups; n++) {
#pragma unroll
        for (int i = 0; i < kWeightBits; i++) {
            int part[4] = {0, 0, 0, 0};
            binaryMma256(part, make_uint4(upper[i].x, lower[i].x, upper[i].y, lower[i].y), x[n].x, x[n].y);
            binaryMma256(part, make_uint4(upper[i].z, lower[i].z, upper[i].w, lower[i].w), x[n].z, x[n].w);
#pragma unroll
            for (int e = 0; e < 4; e++) total[n][e] += part[e] << i;
        }
    }
}

__device__ __forceinline__ int bitCount(uint4 chunk) {
    return __popc(chunk.x) + __popc(chunk.y) + __popc(chunk.z) + __popc(chunk.w);
}

// The same of values times their scale codes. pairs: scale codes of the half's four lines, of rows g and g + 8; own: of line t.
template <int kWeightBits, int kGroups>
__device__ __forceinline__ void addCodedHalf(int (&total)[kGroups][4], const uint4 (&upper)[kWeightBits],
                                             const uint4 (&lower)[kWeightBits], const uint4 (&x)[kGroups],
                                             const uint16 (&pairs)[kHalfChunks], uint32 own) {
    constexpr int kLimit = (1 << kWeightBits) - 1;
    uint32 ofUpper[kWeightBits][kHalfChunks], ofLower[kWeightBits][kHalfChunks], ofX[kGroups][kHalfChunks];
#pragma unroll
    for (int i = 0; i < kWeightBits; i++) exchange(upper[i], ofUpper[i]), exchange(lower[i], ofLower[i]);
#pragma unroll
    for (int n = 0; n < kGroups; n++) {
        int below[4] = {0, 0, 0, 0};
        byteMma32(below, make_uint4(own & 0xFF, own >> 8, 0, 0), bitCount(x[n]), 0);
#pragma unroll
        for (int e = 0; e < 4; e++) total[n][e] -= kLimit * below[e];
        exchange(x[n], ofX[n]);
    }
#pragma unroll
    for (int c = 0; c < kHalfChunks; c++) {
        const int twice[2] = {(pairs[c] & 0xFF) * 2, (pairs[c] >> 8) * 2};
#pragma unroll
        for (int n = 0; n < kGroups; n++) {
            int dot[4] = {0, 0, 0, 0};
#pragma unroll
            for (int i = kWeightBits - 1; i >= 0; i--) {
#pragma unroll
                for (int e = 0; e < 4; e++) dot[e] *= 2;
                binaryMma128(dot, ofUpper[i][c], ofLower[i][c], ofX[n][c]);
            }
#pragma unroll
            for (int e = 0; e < 4; e++) total[n][e] += twice[e / 2] * dot[e];
        }
    }
}

// Of a multiprocessor, at least: with scale codes as many as there are without, where the registers suffice. Three planes fit
// four blocks from Hopper on.
#if __CUDA_ARCH__ >= 900
constexpr int kPlanesOfFourBlocks = 3;
#else
constexpr int kPlanesOfFourBlocks = 2;
#endif
constexpr int blocksAtOnce(int weightBits, int groups, bool coded) {
    if (coded && groups == 1 && weightBits <= 4) return weightBits <= kPlanesOfFourBlocks ? 4 : 3;
    return groups < 4 ? 2 : 1;
}

template <int kWeightBits, int kGroups, bool kZero, bool kCoded>
__global__ void __launch_bounds__(kWarps * kWarpSize, blocksAtOnce(kWeightBits, kGroups, kCoded))
    bipolarGemv(const uint8* __restrict__ xTiles, const uint8* __restrict__ wTiles,      // planes.cuh, bits
                const int* __restrict__ xSums, const int* __restrict__ wSums,            // [M], [N]
                const float* __restrict__ xSteps, const uint16* __restrict__ wScales,    // [M] fp32, [N] fp16
                const uint8* __restrict__ scaleTiles,                                    // scales.cuh, or null
                const void* __restrict__ bias, void* __restrict__ y,                     // [N], [M, N] of dtype
                int M, int N, int K, int actBits, int dtype) {
    constexpr int kColumns = kGroups * kPairColumns;
    static_assert(kGroups <= 4, "more would not fit the registers");
    __shared__ int sums[kWarps][kRows][kColumns];
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, g = lane / 4, t = lane % 4;
    const int kTiles = (K + kBitsPerLine - 1) / kBitsPerLine;
    const int tokens = kColumns / actBits;  // whole tokens per block, at least 1
    const int row = blockIdx.x * kRows + g, firstToken = blockIdx.y * tokens;
    const Widths widths{(1 << actBits) - 1, kCoded ? kCodedLimit : (1 << kWeightBits) - 1};

    const PairLines<kGroups> x(xTiles, firstToken, tokens, M, kTiles, actBits, g);
    int total[kGroups][4] = {};
#pragma unroll 1
    for (int half = warp; half < 2 * kTiles; half += kWarps) {
        const int kTile = half / 2, chunk = half % 2 * kHalfChunks + t;
        uint4 upper[kWeightBits], lower[kWeightBits], ofX[kGroups];
#pragma unroll
        for (int i = 0; i < kWeightBits; i++) {
            const uint8* line = wTiles + lineOffset(row, kTile, kTiles, i, kWeightBits) + chunkOffset(chunk, row);
            upper[i] = __ldcs(reinterpret_cast<const uint4*>(line));
            lower[i] = __ldcs(reinterpret_cast<const uint4*>(line + kPairColumns * kLineBytes));
        }
#pragma unroll
        for (int n = 0; n < kGroups; n++) ofX[n] = x.chunk(n, kTile, chunk);
        if constexpr (kCoded) {
            const size_t line = (size_t(row / kBlockRows) * kTiles + kTile) * kChunksPerLine + half % 2 * kHalfChunks;
            const uint8* codes = scaleTiles + line * kBlockRows + scalePlace(row % kBlockRows);
            const auto pairOf = [&](int c) { return *reinterpret_cast<const uint16*>(codes + c * kBlockRows); };
            uint16 pairs[kHalfChunks];
#pragma unroll
            for (int c = 0; c < kHalfChunks; c++) pairs[c] = pairOf(c);
            addCodedHalf<kWeightBits>(total, upper, lower, ofX, pairs, pairOf(t));
        } else {
            addHalf<kWeightBits>(total, upper, lower, ofX);
        }
    }
#pragma unroll
    for (int n = 0; n < kGroups; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) sums[warp][g + 8 * (e / 2)][n * kPairColumns + 2 * t + e % 2] = total[n][e];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kRows * kColumns; i += kWarps * kWarpSize) {
        int sum = 0;
#pragma unroll
        for (int w = 0; w < kWarps; w++) sum += (&sums[w][0][0])[i];
        (&sums[0][0][0])[i] = sum;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kRows * tokens; i += kWarps * kWarpSize) {
        const int n = featureOfRow(blockIdx.x * kRows + i % kRows), m = firstToken + i / kRows;
        if (n >= N || m >= M) continue;
        int dot = 0;
        for (int j = 0; j < actBits; j++) dot += sums[0][i % kRows][i / kRows * actBits + j] << j;
        const float value = recovered(dot, kCoded ? 0 : tokenTerm(xSums[m], widths),  // values need no term of the token
                                      featureTerm(wSums[n], featureWidths<kZero>(widths), K) *
                                          twiceZero<kZero>(xSums, m, M),
                                      xSteps[m],
                                      weightScale(wScales[n], widths),
                                      bias == nullptr ? 0.f : loadElement(bias, n, dtype));
        storeElement(y, size_t(m) * N + n, value, dtype);
    }
}
