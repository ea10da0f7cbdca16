// Weights of four planes whose levels are in equal steps, two a register: the pattern of the planes is a number then.
//
//   level = step (2 c - 15) + offset,      c = sum_i 2^i sign_i,  step the scale of plane 0
//
// The bits of c under the exponent of a float are an exact number, of which one addition makes 2 c - 15, and one
// multiply-add the level. So a pair costs one or two logic instructions, and the rest runs on the pipe of floats.
// In fp16 a level is rounded once. A step has more bits than bf16, which takes it in two parts.
#pragma once
#include "levels.cuh"

constexpr uint32 kSwapBytes = 0x2301u;                        // of each half of a word
constexpr uint32 kLowCode = 0x001E001Eu, kHighCode = 0x01E001E0u;  // nibbles from bit 1 and from bit 5 of both halves
// fp16: 2 c + 1024 from bit 1 and 2 c + 64 from bit 5, and what leaves 2 c - 15 of them. bf16: 2 c + 128.
constexpr uint32 kHalfLow = 0x64006400u, kHalfHigh = 0x54005400u, kHalfLowLess = 0xE40FE40Fu, kHalfHighLess = 0xD4F0D4F0u;
constexpr uint32 kBfloat = 0x43004300u, kBfloatLess = 0xC30FC30Fu;

// Numbers as products take them without a level (grid_step.cuh): the bits of c under a zero exponent of fp16, c 2^-23 from bit
// 1 on and c 2^-19 from bit 5 on, or from bit 1 on under that of 128 of bf16.

// Steps and offsets of rows g and g + 8, as stored, for sums of such numbers, of fp16 of those from bit 5 on.
template <int kDtype>
struct NumberScales {
    static constexpr bool kHalf = kDtype == kFloat16;
    static constexpr float kUnit = kHalf ? 1 << 20 : 1, kExcess = kHalf ? 15 : 143;  // of n over 2 c - 15
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

// The four pairs of numbers of a word. kAligned: of fp16 all from bit 5 on, else those of even pairs from bit 1 on.
template <int kDtype, bool kAligned>
__device__ __forceinline__ void numbersOf(uint32 word, uint32 (&pairs)[kWordPairs]) {
    const uint32 turned = __byte_perm(word, 0, kSwapBytes);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint32 own = i ? turned : word;
        if constexpr (kDtype == kFloat16) {
            pairs[2 * i] = (own & kLowCode) * (kAligned ? 16 : 1), pairs[2 * i + 1] = own & kHighCode;
        } else {
            pairs[2 * i] = maskedOr(own, kLowCode, kBfloat), pairs[2 * i + 1] = maskedOr(own >> 4, kLowCode, kBfloat);
        }
    }
}

// The levels of one row's group in registers.
template <bool kAdds, int kDtype>
struct GridLevels {
    static constexpr int kScales = 1, kRowBytes = 16;
    uint32 step, rest, offset;  // rest: of the step in bf16

    static __device__ __forceinline__ void make(uint32 tables, int row, const float* scale, float added) {
        const uint32 step = packPair<kDtype>(scale[0], scale[0]), offset = packPair<kDtype>(added, added);
        if constexpr (kDtype == kFloat16) {
            storeShared8(tables + row * kRowBytes, step, offset);
        } else {
            const float rest = scale[0] - __uint_as_float(step << 16);
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
            return kAdds ? multiplyAddPairs<kDtype>(numbers, step, offset) : multiplyPairs<kDtype>(numbers, step);
        } else {
            const uint32 low = kAdds ? multiplyAddPairs<kDtype>(numbers, rest, offset) : multiplyPairs<kDtype>(numbers, rest);
            return multiplyAddPairs<kDtype>(numbers, step, low);
        }
    }
};

// One row's 32 columns.
struct GridWords {
    static constexpr bool kApart = true;  // whether words need no others
    uint32 words[kGridPlanes];

    __device__ __forceinline__ void takeWord(int s, uint32 word) { words[s] = word; }

    __device__ __forceinline__ void take(const uint32 (&codes)[kGridPlanes]) {
#pragma unroll
        for (int i = 0; i < kGridPlanes; ++i) words[i] = codes[i];
    }
    // The four pairs of word s.
    template <bool kAdds, int kDtype>
    __device__ __forceinline__ void expand(const GridLevels<kAdds, kDtype>& levels, int s, uint32 (&pairs)[kWordPairs]) const {
        const uint32 turned = __byte_perm(words[s], 0, kSwapBytes);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32 word = i ? turned : words[s];
            if constexpr (kDtype == kFloat16) {
                pairs[2 * i] = levels.of(addPairs<kDtype>(maskedOr(word, kLowCode, kHalfLow), kHalfLowLess));
                pairs[2 * i + 1] = levels.of(addPairs<kDtype>(maskedOr(word, kHighCode, kHalfHigh), kHalfHighLess));
            } else {
                pairs[2 * i] = levels.of(addPairs<kDtype>(maskedOr(word, kLowCode, kBfloat), kBfloatLess));
                pairs[2 * i + 1] = levels.of(addPairs<kDtype>(maskedOr(word >> 4, kLowCode, kBfloat), kBfloatLess));
            }
        }
    }
};

template <bool kAdds_, int kDtype_>
struct GridExpansion {
    static constexpr int kBits = kGridPlanes, kDtype = kDtype_;
    static constexpr bool kCodes = true, kGrid = true, kAdds = kAdds_;
    using Words = GridWords;
    using Row = GridLevels<kAdds_, kDtype_>;
};

template <int kOrder, int kBits, bool kAdds, int kDtype>
struct ExpansionOf {
    using Type = LevelExpansion<kBits, BlockOf<kOrder == kCodeOrder>::template Type, kAdds, kDtype>;
};
template <int kBits, bool kAdds, int kDtype>
struct ExpansionOf<kGridOrder, kBits, kAdds, kDtype> {
    static_assert(kBits == kGridPlanes, "a grid has four planes");
    using Type = GridExpansion<kAdds, kDtype>;
};
