// The words of a lane's 32 columns of a row as codes of their levels, the order for batches (ops/bcq/codes.py):
//
//   up to four planes, and the others of more than four, are a block by themselves:
//   1 plane    the plane
//   2 planes   word e: pair of bits j is the pattern of column 2 j + e
//   3 planes   word s: low three bits of nibble m are the pattern of column 4 m + s; the fourth bits of word s are plane
//              s of columns 4 m + 3
//   4 planes   word s: the same for all s, of where planes 1 to 3 agree with plane 0. The fourth bits of nibbles 1, 3, 5, 7
//              and 0, 2, 4, 6 say whether plane 0 is negative at the columns of nibbles 0 to 3 and 4 to 7
#pragma once
#include "tiles.cuh"

constexpr int kBlockPlanes = 4;  // of the first block, at most
constexpr uint32 kEvenBits = 0x55555555u, kNibbleOnes = 0x11111111u, kByteOnes = 0x01010101u;

constexpr int firstPlanes(int bits) { return bits < kBlockPlanes ? bits : kBlockPlanes; }
constexpr int secondPlanes(int bits) { return bits - firstPlanes(bits); }

// The first column of pair i of word s, and how far the second one is from it.
__device__ __forceinline__ int pairColumn(int bits, int s, int i) {
    if (bits == 1) return 4 * s + i;
    if (bits == 2) return s % 2 * 4 + i / 2 * 2 + s / 2 + i % 2 * 16;
    return 8 * i + s;
}
__device__ __forceinline__ int pairDistance(int bits) { return bits == 1 ? 16 : bits == 2 ? 8 : 4; }

// Bits of a where mask is 1, of b elsewhere.
__device__ __forceinline__ uint32 pick(uint32 a, uint32 b, uint32 mask) { return (a & mask) | (b & ~mask); }

// Bits 0, 8, 16 and 24 to bits 0, 4, 8 and 12.
__device__ __forceinline__ uint32 gatherBytes(uint32 bits) {
    const uint32 pairs = (bits | bits >> 4) & 0x00110011u;
    return (pairs | pairs >> 8) & 0x1111u;
}

// A block of codes -> its planes.
template <int kPlanes>
__device__ __forceinline__ void codesToPlanes(uint32* words) {
    if constexpr (kPlanes == 2) {
        const uint32 even = words[0], odd = words[1];
        words[0] = pick(even, odd << 1, kEvenBits), words[1] = pick(even >> 1, odd, kEvenBits);
    } else if constexpr (kPlanes >= 3) {
        uint32 planes[3] = {}, fourth[kPlanes], first = 0;
#pragma unroll
        for (int i = 0; i < 3; ++i) {
#pragma unroll
            for (int s = 0; s < kPlanes; ++s) planes[i] |= (words[s] >> i & kNibbleOnes) << s;
        }
#pragma unroll
        for (int s = 0; s < kPlanes; ++s) fourth[s] = words[s] >> 3 & kNibbleOnes;
        if constexpr (kPlanes == 3) {
#pragma unroll
            for (int i = 0; i < 3; ++i) words[i] = planes[i] | fourth[i] << 3;
        } else {
#pragma unroll
            for (int s = 0; s < kPlanes; ++s) {
                const uint32 negative = gatherBytes(fourth[s] >> 4 & kByteOnes) | gatherBytes(fourth[s] & kByteOnes) << 16;
                first |= (negative ^ kNibbleOnes) << s;
            }
            words[0] = first;
#pragma unroll
            for (int i = 0; i < 3; ++i) words[i + 1] = ~(planes[i] ^ first);
        }
    }
}

template <int kBits>
__device__ __forceinline__ void wordsToPlanes(uint32 (&words)[kBits]) {
    codesToPlanes<firstPlanes(kBits)>(words);
    if constexpr (kBits > kBlockPlanes) codesToPlanes<secondPlanes(kBits)>(words + kBlockPlanes);
}
