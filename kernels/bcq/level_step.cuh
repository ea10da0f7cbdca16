// A tile of a warp in level_gemv.cu: codes to levels, products of 16-bit floats; from shared memory to registers.
#pragma once
#include "grid.cuh"
#include "level_x.cuh"
#include "ring.cuh"

constexpr int kChains = 2;  // sums that products take in turn: one would wait for itself

// Add sums [set of eight tokens][4] of a lane to `target` [row][token], start again at zero. A lane 4 g + t has rows g and
// g + 8 of tokens 2 t and 2 t + 1 of every set.
template <int kSets>
__device__ __forceinline__ void flushSums(float (&sums)[kSets][4], float* target, int lane) {
    constexpr int kTokens = kSets * kProductTokens;
    const int g = lane / kTileQuads, t = lane % kTileQuads;
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
#pragma unroll
        for (int row = 0; row < kLaneRows; ++row) {
            float2* to = reinterpret_cast<float2*>(target + (g + row * (kTileN / kLaneRows)) * kTokens) +
                         set * (kProductTokens / 2) + t;
            float2 sum = *to;
            float* own = sums[set] + 2 * row;
            sum.x += own[0], sum.y += own[1];
            own[0] = own[1] = 0.0f;
            *to = sum;
        }
    }
}

// What level_loop.cuh runs.
template <int kOrder, int kBits, int kSegment, int kTokens_, bool kAdds, int kDtype>
struct LevelProduct {
    using Expansion = typename ExpansionOf<kOrder, kBits, kAdds, kDtype>::Type;
    using Row = typename Expansion::Row;
    static constexpr bool kWoven = kOrder == kCodeOrder && kBits >= 3;  // levels.cuh
    using Record = PairRecord<false, kWoven>;
    using Shape = StepShape<kBits, kSegment, kAnyScaleBits, 1, Row::kScales>;
    using Maker = TableMaker<Row>;
    using Words = typename Expansion::Words;
    static constexpr int kScaleBits = kAnyScaleBits, kTokens = kTokens_;
    static constexpr int kSets = kTokens / kProductTokens, kTileSegments = Shape::kTileSegments;
    static constexpr int kTableBytes = kTileSegments * Maker::kSegmentTable;  // the levels of a tile
    static constexpr int kSumBytes = 0;                                       // of x, for a k tile
    static constexpr bool kRing = false;                                      // whether a warp may have two stages

    uint32 vector, tables, row;
    const Maker maker;
    uint4 codes[kBits];  // of the tile at hand
    Row upper, lower;    // levels of rows g and g + 8
    float sums[kChains][kSets][4] = {};

    // tables: shared address of the warp's kTableBytes.
    __device__ __forceinline__ LevelProduct(int lane, int entries, int scaleBits, uint32 tables)
        : vector(pinned(lane * kVectorBytes)), tables(tables), row(lane / kTileQuads),
          maker(lane, entries, scaleBits, kTileSegments) {}

    // Behind it every warp may multiply.
    template <int kWarps>
    static __device__ __forceinline__ void prepare(uint32, uint32, int, uint32) {}

    // Read a tile from the stage at this shared address, which may be filled again when all lanes have.
    __device__ __forceinline__ void take(uint32 stage) {
#pragma unroll
        for (int i = 0; i < kBits; ++i) codes[i] = loadShared16(stage + vector + i * kWarpSize * kVectorBytes);
        maker.make(stage + Shape::kSignBytes, tables);
    }

    __device__ __forceinline__ void loadLevels(uint32 segment) {
        upper.load(segment, row), lower.load(segment, row + kTileN / kLaneRows);
    }
    // Behind take and a barrier of the warp: what multiplyTile needs first.
    __device__ __forceinline__ void begin() { loadLevels(tables); }

    // place: of the lane's vectors of the tile's record of the first set; setBytes: to the next set's; then the shared
    // address of the tile's sums of x [segment][token].
    __device__ __forceinline__ void multiplyTile(uint32 place, uint32 setBytes, uint32) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32 upperCodes[kBits], lowerCodes[kBits];
#pragma unroll
            for (int i = 0; i < kBits; ++i) {
                upperCodes[i] = half ? codes[i].z : codes[i].x, lowerCodes[i] = half ? codes[i].w : codes[i].y;
            }
            Words upperWords, lowerWords;
            upperWords.take(upperCodes), lowerWords.take(lowerCodes);
            const uint32 halfTables = tables + half * (kTileSegments / 2) * Maker::kSegmentTable;
            multiplyHalf(upperWords, lowerWords, halfTables, place, half, setBytes);
        }
    }

    __device__ __forceinline__ void multiplyHalf(const Words& upperWords, const Words& lowerWords, uint32 halfTables,
                                                 uint32 place, int half, uint32 setBytes) {
        constexpr int kSegmentWords = kWordsPerTileRow / kTileSegments;
#pragma unroll
        for (int word = 0; word < kChunkWords; ++word) {
            if (word % kSegmentWords == 0 && half + word > 0) loadLevels(halfTables + word / kSegmentWords * Maker::kSegmentTable);
            uint32 a[kWordPairs], b[kWordPairs];
            upperWords.template expand<kWoven>(upper, word, a);
            lowerWords.template expand<kWoven>(lower, word, b);
#pragma unroll
            for (int set = 0; set < kSets; ++set) {
                const uint4 x = Record::load(place + set * setBytes, half, word);
                shortMma16<kDtype>(sums[0][set], make_uint4(a[0], b[0], a[1], b[1]), x.x, x.y);
                shortMma16<kDtype>(sums[1][set], make_uint4(a[2], b[2], a[3], b[3]), x.z, x.w);
            }
        }
    }

    __device__ __forceinline__ void flush(float* target, int lane) {
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[0][set][i] += sums[1][set][i], sums[1][set][i] = 0.0f;
        }
        flushSums(sums[0], target, lane);
    }
};
