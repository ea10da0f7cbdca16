// Weights of two planes or four to eight whose levels are in equal steps, two a register: the pattern of the planes is a number.
//
//   level = step (2 c - C) + offset,      c = sum_i 2^i sign_i,  C = 2^planes - 1,  step the scale of plane 0
//
// The bits of c under the exponent of a float are an exact number, of which one addition makes 2 c - C, and one
// multiply-add the level. So a pair costs one or two logic instructions, and the rest runs on the pipe of floats.
// In fp16 a level is rounded once. A step has more bits than bf16, which takes it in two parts. Numbers of more than four bits are
// put together in the bytes of a register, of which permutations make floats (bytesOf). A level is then
// 2 step (c - (C + 1) / 2) + (offset + step), of which the last sum is rounded too.
#pragma once
#include "levels.cuh"

constexpr uint32 kSwapBytes = 0x2301u;  // of each half of a word

constexpr uint32 inBothHalves(uint32 value) { return value << 16 | value; }

// Where the four pairs of a word s are in it, before (pairs 0 and 1) and after its bytes are swapped, in both halves: at bits
// 1, 3, 5 and 7, of which an even s has the first two, or at bits 1 and 5.
template <int kBits>
struct GridPlaces {
    static constexpr int kWords = 4 / kBits;  // s that share a word
    static constexpr int kPlaces = 2 * kWords, kLast = 9 - kBits;
    static constexpr int kMostCode = (1 << kBits) - 1;

    static constexpr int bit(int place) { return 1 + place * kBits; }
    static constexpr int placeOf(int s, int pair) { return s % kWords * 2 + pair % 2; }
    static constexpr uint32 mask(int bit) { return inBothHalves(kMostCode << bit); }
    // 2 c + 2^(11 - bit) of fp16, or 2 c + 2^(8 - bit) of bf16, without c, and what leaves 2 c - C of it.
    static constexpr uint32 base(int dtype, int bit) { return inBothHalves(dtype == kFloat16 ? (26 - bit) << 10 : (135 - bit) << 7); }
    static constexpr uint32 less(int dtype, int bit) { return base(dtype, bit) | inBothHalves(0x8000 | kMostCode << (bit - 1)); }
};
constexpr int kBfloatBits = 7;  // of a mantissa

constexpr uint32 kByteNibbles = 0x0F0F0F0Fu, kBytePairs = 0x03030303u;
constexpr uint32 kHalfBase = 0x64646464u, kBfloatBase = 0x43434343u;  // the upper bytes of 1024 in fp16, of 128 in bf16

__device__ __forceinline__ uint32 shifted(uint32 word, int up) { return up < 0 ? word >> -up : word << up; }

// The numbers of pairs 2 b and 2 b + 1 of word s, of kBits that areBytes: of the former in bytes 0 and 2.
template <int kBits>
__device__ __forceinline__ uint32 bytesOf(const uint32 (&words)[kBits], int s, int b) {
    if constexpr (kBits == kBitsPerByte) return words[4 * b + s];
    uint32 bytes = words[s] >> 4 * b & kByteNibbles;
    if constexpr (kBits >= 6) bytes |= shifted(words[4 + s % 2], 4 - 4 * b - s / 2 * 2) & kBytePairs << 4;
    if constexpr (kBits % 2 == 1) bytes |= shifted(words[kBits - 1], kBits - 1 - 4 * b - s) & kByteOnes << (kBits - 1);
    return bytes;
}

// Four numbers in bytes as two pairs of floats: a base of these upper bytes plus each, or in bf16 eight bits without a base.
template <int kBits, int kDtype>
__device__ __forceinline__ void pairsOfBytes(uint32 bytes, uint32 base, uint32 (&pairs)[2]) {
    if constexpr (kDtype == kBfloat16 && kBits == kBitsPerByte) {  // 128 and seven bits, less 128 where the eighth is zero
        const uint32 low = bytes & 0x7F7F7F7Fu, set[2] = {selectBytes(bytes, 0, 0xAA88u), selectBytes(bytes, 0, 0xBB99u)};
        pairsOfBytes<kBits - 1, kDtype>(low, kBfloatBase, pairs);
#pragma unroll
        for (int i = 0; i < 2; ++i) pairs[i] = addPairs<kDtype>(pairs[i], inBothHalves(0xC300u) & ~set[i]);
    } else {
        pairs[0] = selectBytes(bytes, base, 0x4240u), pairs[1] = selectBytes(bytes, base, 0x4341u);
    }
}

// The four pairs of word s, of kBits that areBytes.
template <int kBits, int kDtype>
__device__ __forceinline__ void expandBytes(const uint32 (&words)[kBits], int s, uint32 base, uint32 (&pairs)[kWordPairs]) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
        uint32 two[2];
        pairsOfBytes<kBits, kDtype>(bytesOf<kBits>(words, s, b), base, two);
        pairs[2 * b] = two[0], pairs[2 * b + 1] = two[1];
    }
}

// Numbers as products take them without a level (grid_step.cuh): c under a zero exponent of fp16, c 2^(bit - 24), or from
// bit 1 on under that of 128 of bf16; those in bytes from bit 0 on.

// Steps and offsets of rows g and g + 8, as stored, for sums of such numbers, of fp16 of those from the last place.
template <int kBits, int kDtype>
struct NumberScales {
    static constexpr bool kHalf = kDtype == kFloat16, kBytes = areBytes(kBits);
    static constexpr float kUnit = kHalf ? 1 << (25 - (kBytes ? 0 : GridPlaces<kBits>::kLast)) : kBytes ? 2 : 1;
    static constexpr float kBase = kHalf || kBits == kBitsPerByte ? 0 : kBytes ? 256 : 128;
    static constexpr float kExcess = GridPlaces<kBits>::kMostCode + kBase;  // of n over 2 c - C
    float step[kLaneRows], rest[kLaneRows];

    // stored: the two steps, then the two offsets or zeros.
    __device__ __forceinline__ explicit NumberScales(uint2 stored) {
#pragma unroll
        for (int row = 0; row < kLaneRows; ++row) {
            step[row] = halfToFloat(uint16(stored.x >> row * 16));
            rest[row] = fmaf(step[row], -kExcess, halfToFloat(uint16(stored.y >> row * 16)));
            step[row] *= kUnit;
        }
    }
};

// The four pairs of numbers of word s. kAligned: of fp16 all at the last place, else where they stand.
template <int kBits, int kDtype, bool kAligned>
__device__ __forceinline__ void numbersOf(const uint32 (&words)[kBits], int s, uint32 (&pairs)[kWordPairs]) {
    if constexpr (areBytes(kBits)) {
        expandBytes<kBits, kDtype>(words, s, kDtype == kFloat16 ? 0 : kBfloatBase, pairs);
    } else {
        using Places = GridPlaces<kBits>;
        const uint32 word = words[s / Places::kWords], turned = __byte_perm(word, 0, kSwapBytes);
#pragma unroll
        for (int i = 0; i < kWordPairs; ++i) {
            const uint32 own = i / 2 ? turned : word;
            const int bit = Places::bit(Places::placeOf(s, i)), first = Places::bit(0);
            if constexpr (kDtype == kFloat16) {
                pairs[i] = (own & Places::mask(bit)) << (kAligned ? Places::kLast - bit : 0);
            } else {
                pairs[i] = maskedOr(own >> (bit - first), Places::mask(first), Places::base(kDtype, first));
            }
        }
    }
}

// The levels of one row's group in registers.
template <bool kAdds, int kDtype, bool kBytes>
struct GridLevels {
    static constexpr int kScales = 1, kRowBytes = 16;
    static constexpr bool kOffsets = kAdds, kSums = kAdds || kBytes;
    uint32 step, rest, offset;  // rest: of the step in bf16

    static __device__ __forceinline__ void make(uint32 tables, int row, const float* scale, float added) {
        const float unit = kBytes ? 2 * scale[0] : scale[0], sum = kBytes ? added + scale[0] : added;
        const uint32 step = packPair<kDtype>(unit, unit), offset = packPair<kDtype>(sum, sum);
        if constexpr (kDtype == kFloat16) {
            storeShared8(tables + row * kRowBytes, step, offset);
        } else {
            const float rest = unit - __uint_as_float(step << 16);
            storeShared16(tables + row * kRowBytes, make_uint4(step, offset, packPair<kDtype>(rest, rest), 0));
        }
    }
    __device__ __forceinline__ void load(uint32 tables, int row) {
        if constexpr (kDtype == kFloat16) {
            const uint2 two = loadSharedWords(tables + row * kRowBytes);
            step = two.x, offset = two.y;
        } else {
            const uint4 all = loadShared16(tables + row * kRowBytes);
            step = all.x, offset = all.y, rest = all.z;
        }
    }
    __device__ __forceinline__ uint32 of(uint32 numbers) const {
        if constexpr (kDtype == kFloat16) {
            return kSums ? multiplyAddPairs<kDtype>(numbers, step, offset) : multiplyPairs<kDtype>(numbers, step);
        } else {
            const uint32 low = kSums ? multiplyAddPairs<kDtype>(numbers, rest, offset) : multiplyPairs<kDtype>(numbers, rest);
            return multiplyAddPairs<kDtype>(numbers, step, low);
        }
    }
};

// One row's 32 columns.
template <int kBits>
struct GridWords {
    using Places = GridPlaces<kBits>;
    static constexpr bool kBytes = areBytes(kBits), kApart = kBits == kBlockPlanes;  // whether words need no others
    uint32 words[kBits];

    __device__ __forceinline__ void takeWord(int s, uint32 word) { words[s] = word; }

    __device__ __forceinline__ void take(const uint32 (&codes)[kBits]) {
#pragma unroll
        for (int i = 0; i < kBits; ++i) words[i] = codes[i];
    }
    // The four pairs of word s.
    template <bool kWoven = false, bool kAdds, int kDtype>
    __device__ __forceinline__ void expand(const GridLevels<kAdds, kDtype, kBytes>& levels, int s, uint32 (&pairs)[kWordPairs]) const {
        static_assert(!kWoven, "bytes are those of levels by planes");
        if constexpr (kBytes) {
            constexpr bool kBase = kDtype == kFloat16 || kBits < kBitsPerByte;  // 1024, or 128 in bf16
            constexpr uint32 kMiddle = 1 << (kBits - 1), kLess = (kDtype == kFloat16 ? 0xE400u : 0xC300u) | (kBase ? kMiddle : 0);
            expandBytes<kBits, kDtype>(words, s, kDtype == kFloat16 ? kHalfBase : kBfloatBase, pairs);
#pragma unroll
            for (int i = 0; i < kWordPairs; ++i) pairs[i] = levels.of(addPairs<kDtype>(pairs[i], inBothHalves(kLess)));
        } else {
            const uint32 whole = words[s / Places::kWords], turned = __byte_perm(whole, 0, kSwapBytes);
#pragma unroll
            for (int i = 0; i < kWordPairs; ++i) {
                const uint32 own = i / 2 ? turned : whole;
                const int stored = Places::bit(Places::placeOf(s, i)), fits = kDtype == kFloat16 || stored + kBits <= kBfloatBits;
                const int bit = fits ? stored : stored - 4;
                const uint32 number = maskedOr(own >> (stored - bit), Places::mask(bit), Places::base(kDtype, bit));
                pairs[i] = levels.of(addPairs<kDtype>(number, Places::less(kDtype, bit)));
            }
        }
    }
};

template <int kBits_, bool kAdds_, int kDtype_>
struct GridExpansion {
    static_assert(kBits_ == 2 || kBits_ >= 4, "those of one plane or three are codes");
    static constexpr int kBits = kBits_, kDtype = kDtype_;
    static constexpr bool kCodes = true, kGrid = true, kAdds = kAdds_;
    using Words = GridWords<kBits>;
    using Row = GridLevels<kAdds_, kDtype_, areBytes(kBits_)>;
};

template <int kOrder, int kBits, bool kAdds, int kDtype>
struct ExpansionOf {
    using Type = LevelExpansion<kBits, BlockOf<kOrder == kCodeOrder>::template Type, kAdds, kDtype>;
};
template <int kBits, bool kAdds, int kDtype>
struct ExpansionOf<kGridOrder, kBits, kAdds, kDtype> {
    using Type = GridExpansion<kBits, kAdds, kDtype>;
};
