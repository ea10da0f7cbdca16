// One step of a warp in int8_gemv.cu: signs to bytes, INT8 products, scales; from shared memory to registers.
#pragma once
#include "bytes.cuh"
#include "ring.cuh"

// Bit j of the four digits of half a word, as four signed bytes: -1 where it is 1 and 0 where it is 0 for j < 3, and
// 0 and 1 the other way round for j = 3. A byte permutation takes a digit as a table index in its bits 0-2 and, in bit
// 3, as whether to copy the entry's sign over the byte: entries of 0 and -1 do not change then, and one of 1 becomes 0.
struct DigitTable {
    uint32 low, high;  // entries 0-3, 4-7

    __device__ __forceinline__ uint32 operator()(uint32 halfWord) const { return selectBytes(low, high, halfWord); }
};

// unknown: 0, but not to the compiler and not one for all lanes: constants would be moved to a register at every use.
__device__ __forceinline__ DigitTable digitTable(int bit, uint32 unknown) {
    constexpr uint32 kLow[kDigitBits] = {0xff00ff00u, 0xffff0000u, 0, 0x01010101u};
    if (bit == 2) return {0, ~0u};
    return {kLow[bit] + unknown, kLow[bit] + unknown};
}

constexpr int kFewPlanes = 4;  // up to which registers carry a loop without a question for offsets beside one with it

// A flag that is known when the kernel is compiled.
template <bool kValue>
struct Constant {
    __device__ __forceinline__ constexpr operator bool() const { return kValue; }
};

// What ring.cuh runs. A lane 4 g + t ends up with rows g and g + 8 of token t of every set of four tokens; or, of
// fewer tokens, with word t's part of them: a token's product has columns for each of the four words that the lanes of
// a quad have (kApart), so that no word has to be given to another lane where groups are narrow.
template <int kBits, int kSegment, int kScaleBits_, int kTokens_, int kStepTiles>
struct Int8Product {
    using Shape = StepShape<kBits, kSegment, kScaleBits_, kStepTiles>;
    static constexpr int kScaleBits = kScaleBits_, kTokens = kTokens_, kSetTokens = kTokens < kByteTokens ? 1 : kByteTokens;
    static constexpr bool kApart = kSetTokens == 1, kHoldsWord = kTokens == 1;
    using Record = ByteRecord<kSegment, kApart>;
    static constexpr int kSets = kTokens / kSetTokens, kHalfColumns = kTileK / 2, kProducts = 4;  // of half a tile
    static constexpr int kHalfGroups = kHalfColumns / kSegment, kHalfSegments = kApart ? 1 : kHalfGroups;
    static constexpr int kSegmentProducts = kProducts / kHalfSegments;

    uint32 vector, bytesOfX, scale, about, source, shift;
    DigitTable tables[kDigitBits];
    float sums[kSets][kLaneRows] = {};

    __device__ __forceinline__ Int8Product(int lane, int entries, uint32 groupBytes) {
        const int g = lane / kTileQuads, t = lane % kTileQuads;
        vector = pinned(lane * kVectorBytes);
        scale = Shape::kSignBytes + g * entries * Shape::kEntryBytes;
        if constexpr (kApart) {
            bytesOfX = pinned((t == g / kByteKinds ? g : Record::kZeros) * sizeof(uint4));
            scale = pinned(scale + t / (kSegment / kBitsPerWord) * groupBytes);
            about = pinned(Record::kAbout + t * sizeof(uint4));
        } else {
            bytesOfX = vector;
            scale = pinned(scale);
            about = pinned(kHalfBytes + t * sizeof(uint4));
        }
        // Which of a segment's half words the lane has; source: where the first segment's is.
        const int halfWord = kHalfSegments == 4 ? t / 2 : t;
        source = pinned(g * kTileQuads + halfWord / 2);
        shift = pinned(halfWord % 2 * (kBitsPerWord / 2));
#pragma unroll
        for (int bit = 0; bit < kDigitBits; ++bit) tables[bit] = digitTable(bit, lane * (uint32(entries) >> 31));
        if (kHalfSegments == 4 && t % 2) tables[0] = tables[2], tables[1] = tables[3];
    }

    // The bytes of product `product` of the segment: registers 0 and 2 of A, from a row's word.
    __device__ __forceinline__ uint2 bytes(uint32 word, int product) const {
        if constexpr (kHalfSegments == 1) return make_uint2(tables[product](word), tables[product](upperHalf(word)));
        else return make_uint2(tables[2 * product](word), tables[2 * product + 1](word));
    }

    // Products of segment `segment` of half a tile with the lane's words of rows g and g + 8.
    __device__ __forceinline__ void multiply(uint32 first, uint32 second, const uint4 (&x)[kSets][2], int segment,
                                             int (&codes)[kSets][4]) const {
        if constexpr (kHalfSegments > 1) {
            const int from = source + segment * (kTileQuads / kHalfSegments);
            first = __shfl_sync(kFullWarp, first, from) >> shift;
            second = __shfl_sync(kFullWarp, second, from) >> shift;
        }
#pragma unroll
        for (int product = 0; product < kSegmentProducts; ++product) {
            const uint2 a = bytes(first, product), b = bytes(second, product);
            const int index = segment * kSegmentProducts + product;
#pragma unroll
            for (int set = 0; set < kSets; ++set) {
                const uint4 pair = x[set][index / 2];
                signedMma32(codes[set], codes[set], make_uint4(a.x, b.x, a.y, b.y), index % 2 ? pair.z : pair.x,
                          index % 2 ? pair.w : pair.y);
            }
        }
    }

    // Add one segment's products. scales: shared address of its first entry; about: of token t of the first set.
    template <class Flag>
    __device__ __forceinline__ void addSegment(const uint4 (&signs)[kBits], const uint4 (&x)[kSets][2], bool upper,
                                               int segment, uint32 scales, Flag offset, uint32 about, uint32 setBytes) {
        float group[kSets][kLaneRows] = {};
        float2 facts[kSets];
#pragma unroll
        for (int set = 0; set < kSets; ++set) facts[set] = loadShared8(about + set * setBytes);
#pragma unroll
        for (int i = 0; i < kBits; ++i) {
            int codes[kSets][4] = {};
            multiply(upper ? signs[i].z : signs[i].x, upper ? signs[i].w : signs[i].y, x, segment, codes);
            const uint32 pair = loadPair<kScaleBits>(scales + i * Shape::kEntryBytes);
            const float rowScales[kLaneRows] = {scaleValue<kScaleBits>(pair),
                                                scaleValue<kScaleBits>(pair >> kScaleBits)};
#pragma unroll
            for (int set = 0; set < kSets; ++set) {
#pragma unroll
                for (int row = 0; row < kLaneRows; ++row) {
                    // 256 hi + lo = P3 - v, v the sum of the codes where the sign is 1
                    const int high = codes[set][2 * row], low = codes[set][2 * row + 1];
                    const int signedSum = low * -2 + (high * -512 + __float_as_int(facts[set].y));
                    group[set][row] += rowScales[row] * (__uint_as_float(signedSum) - kRoundToInteger);
                }
            }
        }
        if (offset) {  // times the sum of x
            const uint32 pair = loadPair<kScaleBits>(scales + kBits * Shape::kEntryBytes);
#pragma unroll
            for (int set = 0; set < kSets; ++set) {
                const float codeSum = __uint_as_float(loadShared4(about + set * setBytes + sizeof(float2)));
                group[set][0] += offsetValue<kScaleBits>(pair) * codeSum;
                group[set][1] += offsetValue<kScaleBits>(pair >> kScaleBits) * codeSum;
            }
        }
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
#pragma unroll
            for (int row = 0; row < kLaneRows; ++row) {
                sums[set][row] += facts[set].x * group[set][row];
            }
        }
    }

    // stage, records: shared addresses of the step's weights and of its records, the latter of the first set.
    __device__ __forceinline__ void multiplyStep(uint32 stage, int entries, uint32 records, uint32 setBytes) {
        if constexpr (kBits > kFewPlanes) multiplyStage(stage, entries > kBits, records, setBytes);
        else if (entries > kBits) multiplyStage(stage, Constant<true>{}, records, setBytes);
        else multiplyStage(stage, Constant<false>{}, records, setBytes);
    }

    // offset: whether groups have one; Constant where the loop is compiled for either.
    template <class Flag>
    __device__ __forceinline__ void multiplyStage(uint32 stage, Flag offset, uint32 records, uint32 setBytes) {
        const uint32 groupBytes = Shape::groupVectors(offset) * kVectorBytes;
        uint32 scales = stage + scale;
#pragma unroll(kHalfSegments == 1 ? kStepTiles : 1)  // registers run short otherwise
        for (int tile = 0; tile < kStepTiles; ++tile) {
            uint4 signs[kBits];
#pragma unroll
            for (int i = 0; i < kBits; ++i) {
                signs[i] = loadShared16(stage + vector + (tile * kBits + i) * kWarpSize * kVectorBytes);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const uint32 record = records + tile * Record::kBytes + half * Record::kHalf;
                uint4 x[kSets][2];
#pragma unroll
                for (int set = 0; set < kSets; ++set) {
#pragma unroll
                    for (int v = 0; v < 2; ++v) {
                        x[set][v] = loadShared16(record + bytesOfX + set * setBytes + v * Record::kPairBytes);
                    }
                }
#pragma unroll
                for (int segment = 0; segment < kHalfSegments; ++segment) {
                    addSegment(signs, x, half, segment, scales, offset,
                               record + about + segment * kByteTokens * sizeof(uint4), setBytes);
                    scales += kHalfGroups / kHalfSegments * groupBytes;
                }
            }
        }
    }

    // Add to `target` [row][token], start again at zero.
    __device__ __forceinline__ void flush(float* target, int lane) {
        if constexpr (kApart) return flushQuads<kTokens>(sums, target, lane);
        const int g = lane / kTileQuads, t = lane % kTileQuads;
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
#pragma unroll
            for (int row = 0; row < kLaneRows; ++row) {
                target[(g + row * (kTileN / kLaneRows)) * kTokens + set * kSetTokens + t] += sums[set][row];
                sums[set][row] = 0.0f;
            }
        }
    }
};
