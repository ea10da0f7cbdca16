// x [M, K], fp16 or bf16, in the order of arrange.cuh for weights of `bits` planes, zeros behind column K.
//
// Tokens behind M are not written: a product mixes no tokens, and what comes of theirs is not written either.
// Grid: x = 128 columns, two panels; y = kBlockTokens tokens. A block takes its part of x through shared memory, so that
// it reads and writes whole vectors.
#include "arrange.cuh"
#include "../shared/mma.cuh"

constexpr int kBlockTokens = QK_ARRANGE_TOKENS, kBlockK = 2 * kPanelK, kThreads = QK_ARRANGE_THREADS;
constexpr int kRowVectors = kBlockK * kShortBytes / kVectorBytes, kVectorValues = kVectorBytes / kShortBytes;
constexpr int kPaddedRow = kBlockK + 2;  // rows begin in different banks
static_assert(kBlockTokens * kRowVectors == kThreads, "a vector a thread");

namespace {

using Rows = uint16[kBlockTokens][kPaddedRow];

// The vector of a row of x that a thread puts in order: of the block's rows, of its row, of all rows, its first column.
struct ThreadVector {
    int row, vector, m, k;
    __device__ __forceinline__ ThreadVector()
        : row(threadIdx.x / kRowVectors), vector(threadIdx.x % kRowVectors), m(blockIdx.y * kBlockTokens + row),
          k(blockIdx.x * kBlockK + vector * kVectorValues) {}
};

// present: whether token m has a row of x, which is row `source`.
__device__ __forceinline__ void arrangeVector(Rows& rows, const ThreadVector& own, const uint16* x, uint4* arranged,
                                              bool present, int source, int K, int tileTokens, int bits, int vectors) {
    const int row = own.row, vector = own.vector, m = own.m, k = own.k;
    uint32 pairs[kVectorValues / 2] = {};
    if (present) {
        const uint16* from = x + size_t(source) * K + k;
        if (vectors) {
            if (k < K) {
                const uint4 raw = *reinterpret_cast<const uint4*>(from);
                pairs[0] = raw.x, pairs[1] = raw.y, pairs[2] = raw.z, pairs[3] = raw.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < kVectorValues; ++i) {
                if (k + i < K) pairs[i / 2] |= uint32(from[i]) << i % 2 * 16;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kVectorValues / 2; ++i) {
        *reinterpret_cast<uint32*>(&rows[row][vector * kVectorValues + 2 * i]) = pairs[i];
    }
    __syncthreads();
    if (!present) return;

    const int panel = vector / kPanelChunks, chunk = vector % kPanelChunks;
    const int column = pairColumn(bits, panel * 2 + chunk / 4, chunk % 4), distance = pairDistance(bits);
#pragma unroll
    for (int t = 0; t < kTileQuads; ++t) {
        const uint16* own = &rows[row][t * kBitsPerWord + column];
        pairs[t] = own[0] | uint32(own[distance]) << 16;
    }
    const int panels = (K + kTileK - 1) / kTileK * kTilePanels, place = m % tileTokens;
    const size_t target = ((size_t(m / tileTokens) * panels + blockIdx.x * 2 + panel) * tileTokens + place) * kPanelChunks;
    arranged[target + (chunk ^ place % kPanelChunks)] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

}  // namespace

__global__ void __launch_bounds__(kThreads)
bcqArrange(const uint16* x,                // [M, K]; written until the wait, so not __restrict__
           uint4* __restrict__ arranged,  // see arrange.cuh
           int M, int K,
           int tileTokens,  // of a token tile
           int bits, int vectors) {  // vectors: rows of x are 16-byte aligned and K % 8 == 0
    __shared__ Rows rows;
    const ThreadVector own;
    allowNextKernel();
    waitForPriorKernels();
    arrangeVector(rows, own, x, arranged, own.m < M, own.m, K, tileTokens, bits, vectors);
}

// For experts: place m of their tiles takes row slots[m] / choices of x; places of no pair, -1, stay as they are.
__global__ void __launch_bounds__(kThreads)
bcqExpertsArrange(const uint16* x,                // [pairs / choices, K]; written until the wait, as slots are
                  uint4* __restrict__ arranged,  // see arrange.cuh
                  const int* slots,              // [M], route.cu
                  int choices,                   // pairs that share a row of x
                  int M, int K, int tileTokens, int bits, int vectors) {
    __shared__ Rows rows;
    const ThreadVector own;
    allowNextKernel();
    waitForPriorKernels();
    const int slot = own.m < M ? slots[own.m] : -1;
    arrangeVector(rows, own, x, arranged, slot >= 0, slot / choices, K, tileTokens, bits, vectors);
}
