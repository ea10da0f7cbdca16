// Weights from sign planes or their codes, two a register: for the pattern that the planes have at a column, the level of its group.
//
//   level = sum_i scale_i (2 sign_i - 1) + offset
//
// A table of eight 16-bit levels is two registers of low and two of high bytes. One byte permutation looks up four bytes
// by the four nibbles of a selector, so four levels cost two look-ups and two permutations that put the bytes together.
// Four planes have sixteen levels, which are eight and their negatives: nibbles then say where planes 1 to 3 agree with
// plane 0, and plane 0 gives the sign. An offset is added behind. More than four planes are two blocks of planes, whose
// levels are added. A word is what is expanded at once: eight of the 32 columns of a lane, four pairs (arrange.cuh; of codes
// level_codes.cuh).
// Every level and every sum rounds to the type of x.
#pragma once
#include "level_codes.cuh"
#include "../shared/mma.cuh"

constexpr int kChunkWords = 4, kWordPairs = 4;  // words of a lane's 32 columns; pairs of a word
constexpr uint32 kIndexBits = 0x77777777u, kByteSigns = 0x80808080u, kPairSigns = 0x80008000u;
constexpr uint32 kEvenPairs = 0x33333333u;
// Two planes: a code of two bits in the low bits of every byte, and what makes of it the selector of a low byte from the
// table's first register and of a high byte from its second.
constexpr uint32 kByteCodes = 0x03030303u, kTwoNibbles = 0x11u, kHighBytes = 0x40404040u;

// The levels of a block of planes by pattern: low bytes in x and y, high bytes in z and w. Of four planes those with
// plane 0 positive and without the offset.
template <int kPlanes, int kDtype>
__device__ __forceinline__ uint4 levelTable(const float* scale, float offset) {
    uint32 pair[4] = {};
    if constexpr (kPlanes >= 3) {
        constexpr int kFirst = kPlanes - 3;  // the plane of a pattern's lowest bit
        const float sum = scale[kFirst + 1] + scale[kFirst + 2], difference = scale[kFirst + 1] - scale[kFirst + 2];
        const float base = kPlanes == 4 ? scale[0] : offset, high = base + scale[kFirst], low = base - scale[kFirst];
        pair[0] = packPair<kDtype>(low - sum, high - sum);
        pair[1] = packPair<kDtype>(low + difference, high + difference);
        pair[2] = packPair<kDtype>(low - difference, high - difference);
        pair[3] = packPair<kDtype>(low + sum, high + sum);
    } else {
        const float high = offset + scale[0], low = offset - scale[0], other = kPlanes == 2 ? scale[kPlanes - 1] : 0.0f;
        pair[0] = packPair<kDtype>(low - other, high - other);
        pair[1] = packPair<kDtype>(low + other, high + other);
    }
    return make_uint4(__byte_perm(pair[0], pair[1], 0x6420), __byte_perm(pair[2], pair[3], 0x6420),
                      __byte_perm(pair[0], pair[1], 0x7531), __byte_perm(pair[2], pair[3], 0x7531));
}

// A block of planes of one row's 32 columns, from which the selector of a word is a few instructions, and fewer where it
// stands in memory as codes (level_codes.cuh).
template <int kPlanes, bool kCodes>
struct PlaneBlock {
    static constexpr bool kStoredAsCodes = kCodes;
    static constexpr bool kSigns = kPlanes == 4;  // whether levels are those of a sign and their negatives
    static constexpr int kWords = kCodes ? kPlanes : 4;
    // Codes; or even, odd: two planes at even and at odd columns, a pair of bits each; the third plane; plane 0 of four.
    uint32 words[kWords];

    __device__ __forceinline__ void take(const uint32* planes) {
        if constexpr (kCodes || kPlanes == 1) {
#pragma unroll
            for (int i = 0; i < kPlanes; ++i) words[i] = planes[i];
            return;
        } else {
            uint32 own[3];  // planes, or where planes 1 to 3 agree with plane 0
#pragma unroll
            for (int i = 0; i < 3; ++i) {
                if constexpr (kPlanes == 4) own[i] = planes[i + 1] ^ ~planes[0];
                else own[i] = i < kPlanes ? planes[i] : 0;
            }
            words[0] = pick(own[0], own[1] << 1, kEvenBits);
            words[1] = pick(own[0] >> 1, own[1], kEvenBits);
            words[2] = own[2];
            if constexpr (kPlanes == 4) words[3] = planes[0];
        }
    }
    __device__ __forceinline__ uint32 word(int i) const { return words[i]; }
    // Nibble m: the pattern of column 4 m + s.
    __device__ __forceinline__ uint32 selector(int s) const {
        if constexpr (kPlanes == 1) return (words[0] >> s) & kNibbleOnes;
        if constexpr (kPlanes == 2) return words[s % 2] >> (s / 2 * 2) & kEvenPairs;
        if constexpr (kPlanes >= 3 && kCodes) {
            if (kPlanes == 3 && s == 3) {
                return (words[0] >> 3 & kNibbleOnes) | (words[1] >> 2 & kNibbleOnes << 1) |
                       (words[2] >> 1 & kNibbleOnes << 2);
            }
            return words[s] & kIndexBits;
        } else if constexpr (kPlanes >= 3) {
            const uint32 two = words[s % 2] >> (s / 2 * 2);
            const uint32 last = s < 2 ? words[2] << (2 - s) : words[2] >> (s - 2);
            return pick(two, last, kEvenPairs) & kIndexBits;
        }
    }
    // The top bits of four bytes: whether plane 0 is negative at the columns of nibbles 0 to 3 or, of the upper half, 4
    // to 7.
    __device__ __forceinline__ uint32 negative(int s, bool upper) const {
        if constexpr (kCodes) return (upper ? words[s] << 4 : words[s]) & kByteSigns;
        const uint32 evens = words[3] << (7 - s), odds = words[3] << (3 - s);
        return ~__byte_perm(evens, odds, upper ? 0x7362 : 0x5140) & kByteSigns;
    }
};

// Low and high bytes of four 16-bit floats -> the pair of the first and third, and that of the second and fourth. kMultiplies:
// the former is what both have in sum, less the latter: two multiply-adds, which have a pipe of their own, for a permutation.
template <bool kMultiplies>
__device__ __forceinline__ void weaveBytes(uint32 low, uint32 high, uint32& even, uint32& odd) {
    odd = __byte_perm(low, high, 0x7351);
    if constexpr (kMultiplies) {
        uint32 both;
        asm("mad.lo.u32 %0, %1, 256, %2;" : "=r"(both) : "r"(high), "r"(low));
        asm("mad.lo.u32 %0, %1, -256, %2;" : "=r"(even) : "r"(odd), "r"(both));
    } else {
        even = __byte_perm(low, high, 0x6240);
    }
}

// The four pairs of word s of a block. kWoven: in the place of pairs 2 i and 2 i + 1 one of their first elements, and one of their
// second ones.
template <bool kWoven, class Block>
__device__ __forceinline__ void expandBlock(const Block& block, const uint4& table, int s, uint32 (&pairs)[kWordPairs]) {
    const uint32 first = block.selector(s), second = upperHalf(first);
    const uint32 low[2] = {selectBytes(table.x, table.y, first), selectBytes(table.x, table.y, second)};
    uint32 high[2] = {selectBytes(table.z, table.w, first), selectBytes(table.z, table.w, second)};
    if constexpr (Block::kSigns) high[0] ^= block.negative(s, false), high[1] ^= block.negative(s, true);
    if constexpr (kWoven) {  // half by either: both pipes have as much to do
        weaveBytes<true>(low[0], high[0], pairs[0], pairs[1]);
        weaveBytes<false>(low[1], high[1], pairs[2], pairs[3]);
    } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            pairs[2 * i] = __byte_perm(low[i], high[i], 0x5140);
            pairs[2 * i + 1] = __byte_perm(low[i], high[i], 0x7362);
        }
    }
}

// The levels of one row's group in registers. kAdds: there is an offset, and the tables do not hold it.
template <int kBits, bool kAdds, int kDtype>
struct Levels {
    static_assert(!kAdds || kBits == 1 || kBits % kBlockPlanes == 0, "other tables hold the offset");
    static constexpr int kScales = kBits, kTables = kBits > kBlockPlanes ? 2 : 1, kTableBytes = kBits <= 2 ? 8 : 16;
    static constexpr bool kOffsets = kAdds && kBits > 1;  // apart from the tables
    static constexpr int kRowBytes = kTables * kTableBytes + (kOffsets ? 4 : 0);
    uint4 first, second;
    uint32 offset;

    // tables: shared address of a segment's: the first ones of 16 rows, then the second ones, then the offsets.
    static __device__ __forceinline__ void make(uint32 tables, int row, const float* scale, float added) {
        if constexpr (kBits == 1) {
            storeShared8(tables + row * kTableBytes, packPair<kDtype>(-scale[0], -scale[0]),
                         packPair<kDtype>(added, added));
        } else if constexpr (kBits == 2) {
            const uint4 table = levelTable<2, kDtype>(scale, added);
            storeShared8(tables + row * kTableBytes, table.x, table.z);
        } else {
            storeShared16(tables + row * kTableBytes, levelTable<firstPlanes(kBits), kDtype>(scale, added));
            if constexpr (kTables == 2) {
                storeShared16(tables + (kTileN + row) * kTableBytes,
                              levelTable<secondPlanes(kBits), kDtype>(scale + kBlockPlanes, added));
            }
            if constexpr (kOffsets) {
                storeShared4(tables + kTileN * kTables * kTableBytes + row * 4, packPair<kDtype>(added, added));
            }
        }
    }
    __device__ __forceinline__ void load(uint32 tables, int row) {
        if constexpr (kBits <= 2) {
            const uint2 two = loadSharedWords(tables + row * kTableBytes);
            first.x = two.x, first.y = two.y;
        } else {
            first = loadShared16(tables + row * kTableBytes);
            if constexpr (kTables == 2) second = loadShared16(tables + (kTileN + row) * kTableBytes);
            if constexpr (kOffsets) offset = loadShared4(tables + kTileN * kTables * kTableBytes + row * 4);
        }
    }
};

template <bool kCodes>
struct BlockOf {
    template <int kPlanes>
    using Type = PlaneBlock<kPlanes, kCodes>;
};

// One row's 32 columns.
template <int kBits, template <int> class Block>
struct PlaneWords {
    static constexpr bool kApart = kBits == kBlockPlanes && Block<kBits>::kStoredAsCodes;  // whether words need no others
    Block<firstPlanes(kBits)> first;
    Block<(kBits > kBlockPlanes ? secondPlanes(kBits) : 1)> second;

    __device__ __forceinline__ void takeWord(int s, uint32 word) { first.words[s] = word; }

    __device__ __forceinline__ void take(const uint32 (&planes)[kBits]) {
        first.take(planes);
        if constexpr (kBits > kBlockPlanes) second.take(planes + kBlockPlanes);
    }
    // The four pairs of word s.
    template <bool kWoven = false, bool kAdds, int kDtype>
    __device__ __forceinline__ void expand(const Levels<kBits, kAdds, kDtype>& levels, int s,
                                           uint32 (&pairs)[kWordPairs]) const {
        if constexpr (kBits == 1) {
#pragma unroll
            for (int i = 0; i < kWordPairs; ++i) {  // columns 4 s + i and 16 further
                pairs[i] = ((first.word(0) << (15 - kWordPairs * s - i)) & kPairSigns) ^ levels.first.x;
                if constexpr (kAdds) pairs[i] = addPairs<kDtype>(pairs[i], levels.first.y);
            }
        } else if constexpr (kBits == 2) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int place = 2 * s + i;  // of four columns: a code of two bits in every byte
                const uint32 codes = (first.word(place / 4) >> place % 4 * 2) & kByteCodes;
                const uint32 selector = codes * kTwoNibbles + kHighBytes;
                pairs[2 * i] = selectBytes(levels.first.x, levels.first.y, selector);
                pairs[2 * i + 1] = selectBytes(levels.first.x, levels.first.y, upperHalf(selector));
            }
        } else {
            expandBlock<kWoven>(first, levels.first, s, pairs);
            if constexpr (kBits > kBlockPlanes) {
                uint32 more[kWordPairs];
                expandBlock<kWoven>(second, levels.second, s, more);
#pragma unroll
                for (int i = 0; i < kWordPairs; ++i) pairs[i] = addPairs<kDtype>(pairs[i], more[i]);
            }
            if constexpr (kAdds) {
#pragma unroll
                for (int i = 0; i < kWordPairs; ++i) pairs[i] = addPairs<kDtype>(pairs[i], levels.offset);
            }
        }
    }
};

// What becomes of a weight's words, in any order but a grid's (grid.cuh).
template <int kBits_, template <int> class Block, bool kAdds, int kDtype_>
struct LevelExpansion {
    static constexpr int kBits = kBits_, kDtype = kDtype_;
    static constexpr bool kCodes = Block<firstPlanes(kBits_)>::kStoredAsCodes, kGrid = false;
    using Words = PlaneWords<kBits_, Block>;
    using Row = Levels<kBits_, kAdds, kDtype_>;
};

// The tables of a tile's 16 rows, made by a warp: a lane those of one row for every second segment. Where there is one
// segment, two lanes make the same.
template <class Row>
struct TableMaker {
    static constexpr int kScales = Row::kScales;
    static constexpr int kSegmentTable = kTileN * Row::kRowBytes;
    const int row, entries, scaleBits, rounds;
    uint32 entry, table, nextEntry;  // bytes: from a slot's scales and from the tables to the lane's first; to its next

    __device__ __forceinline__ TableMaker(int lane, int entries, int scaleBits, int segments)
        : row(lane % kTileN), entries(entries), scaleBits(scaleBits), rounds((segments + 1) / 2) {
        const int segment = segments > 1 ? lane / kTileN : 0, pairBytes = kLaneRows * scaleBits / kBitsPerByte;
        nextEntry = 2 * (kTileN / kLaneRows) * entries * pairBytes;
        entry = (segment * (kTileN / kLaneRows) + row % 8) * entries * pairBytes + row / 8 * (pairBytes / kLaneRows);
        table = segment * kSegmentTable;
    }
    __device__ __forceinline__ void make(uint32 scales, uint32 tables) const {
        uint32 from = scales + entry, to = tables + table;
        int left = rounds;
#pragma unroll 1
        do {
            float scale[kScales], offset = 0.0f;
            if (scaleBits == 16) {
#pragma unroll
                for (int b = 0; b < kScales; ++b) scale[b] = halfToFloat(loadShared2(from + b * 4));
                if (Row::kOffsets || entries > kScales) offset = halfToFloat(loadShared2(from + kScales * 4));
            } else {
#pragma unroll
                for (int b = 0; b < kScales; ++b) scale[b] = float(loadShared1(from + b * 2));
                if (Row::kOffsets || entries > kScales) offset = float(int8(loadShared1(from + kScales * 2)));
            }
            Row::make(to, row, scale, offset);
            from += nextEntry, to += 2 * kSegmentTable;
        } while (--left > 0);
    }
};
