// A tile of a warp in level_gemv.cu, of a weight in equal steps whose segments are wide: products of numbers,
// whose sums meet step and offset once a segment.
//
//   sum_k x (step (2 c - C) + offset) = step sum_k x (2 c + n) + (offset - step (C + n)) sum_k x
//
// The bits of a number in a half word are a 16-bit float as they stand: of fp16 under a zero exponent (n = 0), where each place
// counts another power of two and has sums of its own; of bf16 under that of 128, 2 c + 128 (n = 128). So a pair costs one
// logic instruction or two, and nothing is rounded before the sums. Numbers from bytes all stand at bit 0: n = 0 in fp16, and in bf16
// of up to seven bits 2 c + 256, of eight 2 c.
#pragma once
#include "level_step.cuh"

constexpr int kLeastSummed = 128;  // columns of a segment; sums of narrower ones would cost more than expanding levels

template <int kBits, int kSegment, int kTokens_, bool kAdds, int kDtype>
struct GridProduct {
    using Record = PairRecord<true>;
    using Shape = StepShape<kBits, kSegment, 16, 1, 1>;
    using Places = GridPlaces<kBits>;
    static constexpr int kScaleBits = 16, kTokens = kTokens_, kSets = kTokens / kProductTokens;
    static constexpr int kTileSegments = Shape::kTileSegments, kTableBytes = 0;
    static constexpr int kSumBytes = kTileSegments * kTokens * int(sizeof(float));
    static constexpr int kSegmentWords = kWordsPerTileRow / kTileSegments;
    static constexpr bool kRing = true;
    static constexpr bool kByPlace = kDtype == kFloat16 && !areBytes(kBits);
    static constexpr int kSums = kByPlace ? Places::kPlaces : 2;  // of places, else in turn
    static constexpr float kUnit = kByPlace ? 1 << kBits : 1;  // what those of a place count beside the next

    uint32 vector, entry, quad;
    uint4 codes[kBits];  // of the tile at hand
    uint2 scales[kTileSegments];  // steps of rows g and g + 8, then offsets
    float sums[kSets][4] = {};

    __device__ __forceinline__ GridProduct(int lane, int, int, uint32)
        : vector(pinned(lane * kVectorBytes)), entry(lane / kTileQuads * (kAdds ? 8 : 4)),
          quad(lane % kTileQuads * 2 * sizeof(float)) {}

    template <int kWarps>
    static __device__ __forceinline__ void prepare(uint32 records, uint32 setBytes, int tiles, uint32 sums) {
        sumSegments<Record, kSegment, kTokens, kWarps, kDtype>(records, setBytes, tiles, sums);
        __syncthreads();
    }

    __device__ __forceinline__ void take(uint32 stage) {
#pragma unroll
        for (int i = 0; i < kBits; ++i) codes[i] = loadShared16(stage + vector + i * kWarpSize * kVectorBytes);
        constexpr uint32 kGroupBytes = (kTileN / kLaneRows) * (kAdds ? 8 : 4);
#pragma unroll
        for (int segment = 0; segment < kTileSegments; ++segment) {
            const uint32 from = stage + Shape::kSignBytes + segment * kGroupBytes + entry;
            if constexpr (kAdds) scales[segment] = loadSharedWords(from);
            else scales[segment].x = loadShared4(from);
        }
    }

    __device__ __forceinline__ void begin() {}

    __device__ __forceinline__ void wordsOf(int row, int half, uint32 (&words)[kBits]) const {
#pragma unroll
        for (int i = 0; i < kBits; ++i) {
            const uint4& four = codes[i];
            words[i] = row ? (half ? four.w : four.y) : (half ? four.z : four.x);
        }
    }

    __device__ __forceinline__ void multiplyTile(uint32 place, uint32 setBytes, uint32 xSums) {
        float part[kSums][kSets][4];
#pragma unroll
        for (int i = 0; i < kWordsPerTileRow; ++i) {
            const int half = i / kChunkWords, word = i % kChunkWords;
            uint32 upper[kWordPairs], lower[kWordPairs];  // pairs 0 and 2 are at one place, 1 and 3 at the next, if not in bytes
            uint32 upperWords[kBits], lowerWords[kBits];
            wordsOf(0, half, upperWords), wordsOf(1, half, lowerWords);
            numbersOf<kBits, kDtype, false>(upperWords, word, upper);
            numbersOf<kBits, kDtype, false>(lowerWords, word, lower);
            const int first = kByPlace ? Places::placeOf(word, 0) % kSums : 0;
            const bool begins = i % kSegmentWords < kSums / 2;
#pragma unroll
            for (int set = 0; set < kSets; ++set) {
                const uint4 x = Record::load(place + set * setBytes, half, word);  // pairs 0, 2, 1, 3
                const uint4 evenRows = make_uint4(upper[0], lower[0], upper[2], lower[2]);
                const uint4 oddRows = make_uint4(upper[1], lower[1], upper[3], lower[3]);
                if (begins) {
                    shortProduct16<kDtype>(part[first][set], evenRows, x.x, x.y);
                    shortProduct16<kDtype>(part[first + 1][set], oddRows, x.z, x.w);
                } else {
                    shortMma16<kDtype>(part[first][set], evenRows, x.x, x.y);
                    shortMma16<kDtype>(part[first + 1][set], oddRows, x.z, x.w);
                }
            }
            if (i % kSegmentWords == kSegmentWords - 1) {
                const int segment = i / kSegmentWords;
                addSegment(part, segment, xSums + segment * kTokens * sizeof(float) + quad);
            }
        }
    }

    __device__ __forceinline__ void addSegment(const float (&part)[kSums][kSets][4], int segment, uint32 xSums) {
        const NumberScales<kBits, kDtype> own(kAdds ? scales[segment] : make_uint2(scales[segment].x, 0));
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
            const float2 x = loadShared8(xSums + set * kProductTokens * sizeof(float));
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float numbers = part[0][set][i];
#pragma unroll
                for (int place = 1; place < kSums; ++place) numbers = fmaf(numbers, kUnit, part[place][set][i]);
                sums[set][i] = fmaf(own.step[i / 2], numbers, fmaf(own.rest[i / 2], i % 2 ? x.y : x.x, sums[set][i]));
            }
        }
    }

    __device__ __forceinline__ void flush(float* target, int lane) { flushSums(sums, target, lane); }
};

// Which product a weight has.
template <int kOrder, int kBits, int kSegment, int kTokens, bool kAdds, int kDtype>
struct ProductFor {
    using Type = LevelProduct<kOrder, kBits, kSegment, kTokens, kAdds, kDtype>;
};
template <int kBits, int kTokens, bool kAdds, int kDtype>
struct ProductFor<kGridOrder, kBits, kLeastSummed, kTokens, kAdds, kDtype> {
    using Type = GridProduct<kBits, kLeastSummed, kTokens, kAdds, kDtype>;
};
