// The columns of operand B that the GEMVs share: a (token, plane) pair each, kGroups groups of eight in a block.
#pragma once
#include "planes.cuh"
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
