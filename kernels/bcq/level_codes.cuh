// The words of a lane as codes of their levels, the order for batches (ops/bcq/codes.py).
//
// Of half a tile row, 128 columns, lane t (0 .. 3) holds those whose products it makes when x is read as it is (gemm.cuh):
// element e (0, 1) of pair i (0 .. 3) of its word s (0 .. 3) is
//
//   column       32 s + 8 i + 2 t + e, of the half
//   place        0 .. 31, of the lane, by what is cheap to make pairs of:
//     1 plane    4 s + i + 16 e
//     2 planes   4 (s % 2) + s / 2 + 2 (i / 2) + 16 (i % 2) + 8 e
//     more       8 i + s + 4 e
//
// Up to four planes, and the others of more than four, are a block by themselves, with the patterns of planes at a place:
//
//   1 plane    bit p: place p
//   2 planes   word e: pair of bits j is the pattern of place 2 j + e
//   3 planes   word s: low three bits of nibble m are the pattern of place 4 m + s; the fourth bits of word s are plane
//              s of places 4 m + 3
//   4 planes   word s: the same for all s, of where planes 1 to 3 agree with plane 0. The fourth bits of nibbles 1, 3, 5, 7
//              and 0, 2, 4, 6 say whether plane 0 is negative at the places of nibbles 0 to 3 and 4 to 7
//
// Of two planes or four and more whose levels are in equal steps there is another form (grid.cuh). In that of two and four each
// half of a word is turned up by one bit:
//
//   2 planes   place 16 e + 8 (i / 2) + 4 (s % 2) + 2 (i % 2) + s / 2; pair of bits j of word b the pattern of place 2 j + b
//   4 planes   place 16 e + 4 i + s; nibble m of word s the pattern of place 4 m + s
//   more       place 16 e + 8 (i % 2) + 4 (i / 2) + s
//     8          byte m of word j: the pattern of place 8 m + j
//     5 to 7     nibble m of word s: planes 0 to 3 of place 4 m + s; of 6 and 7, planes 4 and 5 in two words as those of 2 planes
//                above; of 5 and 7, the last plane in a word, bit p: place p
#pragma once
#include "tiles.cuh"

constexpr int kPlaneOrder = 0, kCodeOrder = 1, kGridOrder = 2;  // of a weight in memory (ops/bcq/layout.py)
constexpr int kBlockPlanes = 4;  // of the first block, at most
constexpr uint32 kEvenBits = 0x55555555u, kNibbleOnes = 0x11111111u, kByteOnes = 0x01010101u;

constexpr int firstPlanes(int bits) { return bits < kBlockPlanes ? bits : kBlockPlanes; }
constexpr int secondPlanes(int bits) { return bits - firstPlanes(bits); }

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

// Whether the numbers of a grid are taken from bytes.
constexpr bool areBytes(int bits) { return bits > kBlockPlanes; }

// Words of numbers of so many bits, place by place in turn -> their planes.
template <int kPlanes>
__device__ __forceinline__ void numbersToPlanes(uint32* words) {
    constexpr uint32 kOnes = kPlanes == kBitsPerByte ? kByteOnes : kNibbleOnes;
    uint32 planes[kPlanes] = {};
#pragma unroll
    for (int s = 0; s < kPlanes; ++s) {
#pragma unroll
        for (int i = 0; i < kPlanes; ++i) planes[i] |= (words[s] >> i & kOnes) << s;
    }
#pragma unroll
    for (int i = 0; i < kPlanes; ++i) words[i] = planes[i];
}

// The words of a grid -> its planes.
template <int kBits>
__device__ __forceinline__ void gridToPlanes(uint32 (&words)[kBits]) {
    if constexpr (!areBytes(kBits)) {
#pragma unroll
        for (int s = 0; s < kBits; ++s) words[s] = (words[s] >> 1 & 0x7FFF7FFFu) | (words[s] & 0x00010001u) << 15;
    }
    if constexpr (kBits == 2) {
        codesToPlanes<2>(words);
    } else {
        numbersToPlanes<kBits == kBitsPerByte ? kBits : kBlockPlanes>(words);
        if constexpr (kBits == 6 || kBits == 7) codesToPlanes<2>(words + kBlockPlanes);
    }
}

// The places of a word whose number has this bit, or has not.
constexpr uint32 placesOf(int bit, bool set) {
    uint32 mask = 0;
    for (int place = 0; place < kBitsPerWord; ++place) mask |= uint32((place >> bit & 1) == int(set)) << place;
    return mask;
}

// Exchange two bits of the numbers of a word's places; kHigh above kLow.
template <int kHigh, int kLow>
__device__ __forceinline__ uint32 exchangePlaces(uint32 word) {
    constexpr int kDistance = (1 << kHigh) - (1 << kLow);
    const uint32 moved = (word >> kDistance ^ word) & placesOf(kLow, true) & placesOf(kHigh, false);
    return word ^ moved ^ moved << kDistance;
}

// Exchange a bit of the numbers of places with a bit, `distance`, of t among the four lanes of a row. Whole warps call it.
template <int kPlace>
__device__ __forceinline__ uint32 exchangeWithLanes(uint32 word, int distance, int lane) {
    constexpr uint32 kLower = placesOf(kPlace, false);
    const uint32 other = __shfl_xor_sync(kFullWarp, word, distance);
    return lane & distance ? pick(other >> (1 << kPlace), word, kLower) : pick(word, other << (1 << kPlace), kLower);
}

// A lane's word of a plane in the order for batches -> columns 32 t .. 32 t + 31 of half a tile row: the exchanges of
// ops/bcq/codes.py from the last to the first.
template <int kBits, bool kGrid>
__device__ __forceinline__ uint32 neighbouringColumns(uint32 word, int lane) {
    word = exchangePlaces<1, 0>(word);
    if constexpr (kGrid) {
        word = kBits == 2 ? exchangePlaces<2, 1>(word) : exchangePlaces<2, 0>(word);
        if constexpr (!areBytes(kBits)) word = exchangePlaces<3, 0>(word);
        word = exchangePlaces<4, 0>(word);
    } else if constexpr (kBits == 1) {
        word = exchangePlaces<4, 0>(exchangePlaces<3, 2>(exchangePlaces<2, 1>(word)));
    } else if constexpr (kBits == 2) {
        word = exchangePlaces<4, 3>(exchangePlaces<3, 0>(exchangePlaces<2, 1>(word)));
    } else {
        word = exchangePlaces<2, 0>(word);
    }
    return exchangeWithLanes<2>(exchangeWithLanes<1>(word, 1, lane), 2, lane);
}

// A lane's words of codes -> of planes, of the same columns.
template <int kBits, bool kGrid>
__device__ __forceinline__ void wordsToPlanes(uint32 (&words)[kBits]) {
    if constexpr (kGrid) {
        gridToPlanes(words);
        return;
    }
    codesToPlanes<firstPlanes(kBits)>(words);
    if constexpr (kBits > kBlockPlanes) codesToPlanes<secondPlanes(kBits)>(words + kBlockPlanes);
}
