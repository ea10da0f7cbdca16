// A tile of a warp in level_gemv.cu: codes to levels, products of 16-bit floats; from shared memory to registers.
#pragma once
#include "grid.cuh"
#include "ring.cuh"

constexpr int kProductTokens = 8;  // columns of B
constexpr int kChains = 2;         // sums that products take in turn: one would wait for itself

// A record holds one k tile of eight tokens, in the fragment order of the products' B operand:
//   [half][word s][lane = 4 token + t] uint4, one vector of padding behind a word's
//     pairs 0 .. 3 of a lane's word s (level_codes.cuh): columns 128 half + 32 s + 8 i + 2 t of the token and the next
struct PairRecord {
    // Neighbouring lanes write neighbouring words of a token: with the padding they meet in no bank.
    static constexpr int kWordBytes = (kWarpSize + 1) * kVectorBytes, kHalf = kChunkWords * kWordBytes, kBytes = 2 * kHalf;

    static __device__ __forceinline__ uint32 place(uint32 lane, uint32 half) { return half * kHalf + lane * kVectorBytes; }
    static __device__ __forceinline__ void write(const RawWord& x, uint32 word, unsigned char* record, uint32 token) {
        unsigned char* to = record + word * kWordBytes + place(token * kTileQuads, 0);
#pragma unroll
        for (int t = 0; t < kTileQuads; ++t) {  // pair i: registers 4 i + t
            *reinterpret_cast<uint4*>(to + t * kVectorBytes) =
                make_uint4(x.pairs[t], x.pairs[4 + t], x.pairs[8 + t], x.pairs[12 + t]);
        }
    }
};

// Records of `words` words per token of x, by all threads of the block; of tokens that are there. Not inlined: it runs
// once per pass, and the caller's loop keeps its registers. kAhead: words of a thread that are asked for together.
template <class Record, int kAhead>
__device__ __noinline__ void makePairRecords(const uint16* x, Activations part, uint32 words, unsigned char* records,
                                             uint32 setBytes) {
    const uint32 all = words * part.tokens, magic = 0xffffffffu / words + 1;  // words are many: 2^32 over them, rounded up
#pragma unroll 1
    for (uint32 start = threadIdx.x; start < all; start += kAhead * blockDim.x) {
        RawWord raw[kAhead];
        uint32 token[kAhead], word[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const uint32 index = start + i * blockDim.x;
            token[i] = __umulhi(index, magic), word[i] = index - token[i] * words;
            const int k = part.k + word[i] * kBitsPerWord;
            loadPairs(x + token[i] * part.K + k, index < all ? part.K - k : 0, part.vectors, raw[i].pairs);
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (start + i * blockDim.x >= all) break;
            unsigned char* record = records + token[i] / kProductTokens * setBytes + word[i] / kWordsPerTileRow * Record::kBytes;
            Record::write(raw[i], word[i] % kWordsPerTileRow, record, token[i] % kProductTokens);
        }
    }
}

// What level_loop.cuh runs. A lane 4 g + t ends up with rows g and g + 8 of tokens 2 t and 2 t + 1 of every set of eight.
template <int kOrder, int kBits, int kSegment, int kScaleBits_, int kTokens_, bool kAdds, int kDtype>
struct LevelProduct {
    using Expansion = typename ExpansionOf<kOrder, kBits, kAdds, kDtype>::Type;
    using Record = PairRecord;
    using Row = typename Expansion::Row;
    using Shape = StepShape<kBits, kSegment, kScaleBits_, 1, Row::kScales>;
    using Maker = TableMaker<Row>;
    using Words = typename Expansion::Words;
    static constexpr int kScaleBits = kScaleBits_, kTokens = kTokens_, kSetTokens = kProductTokens;
    static constexpr int kSets = kTokens / kSetTokens, kTileSegments = Shape::kTileSegments;
    static constexpr int kTableBytes = kTileSegments * Maker::kSegmentTable;  // the levels of a tile

    uint32 vector, places[2], tables, row;  // places: of x in the halves of a record
    const Maker maker;
    uint4 codes[kBits];  // of the tile at hand
    float sums[kChains][kSets][4] = {};

    // tables: shared address of the warp's kTableBytes.
    __device__ __forceinline__ LevelProduct(int lane, int entries, uint32 tables)
        : vector(pinned(lane * kVectorBytes)), tables(tables), row(lane / kTileQuads),
          maker(lane, entries, kScaleBits, kTileSegments) {
        places[0] = pinned(Record::place(lane, 0)), places[1] = pinned(Record::place(lane, 1));
    }

    // Read a tile from the stage at this shared address, which may be filled again when all lanes have.
    __device__ __forceinline__ void take(uint32 stage) {
        maker.make(stage + Shape::kSignBytes, tables);
#pragma unroll
        for (int i = 0; i < kBits; ++i) codes[i] = loadShared16(stage + vector + i * kWarpSize * kVectorBytes);
    }

    // record: shared address of the tile's record of the first set.
    __device__ __forceinline__ void multiplyTile(uint32 record, uint32 setBytes) {
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
            multiplyHalf(upperWords, lowerWords, halfTables, record + places[half], setBytes);
        }
    }

    __device__ __forceinline__ void multiplyHalf(const Words& upperWords, const Words& lowerWords, uint32 halfTables,
                                                 uint32 record, uint32 setBytes) {
        constexpr int kSegmentWords = kWordsPerTileRow / kTileSegments;
        Row upper, lower;
#pragma unroll
        for (int word = 0; word < kChunkWords; ++word) {
            if (word % kSegmentWords == 0) {
                const uint32 own = halfTables + word / kSegmentWords * Maker::kSegmentTable;
                upper.load(own, row), lower.load(own, row + kTileN / kLaneRows);
            }
            uint32 a[kWordPairs], b[kWordPairs];
            upperWords.expand(upper, word, a);
            lowerWords.expand(lower, word, b);
#pragma unroll
            for (int set = 0; set < kSets; ++set) {
                const uint4 x = loadShared16(record + set * setBytes + word * Record::kWordBytes);
                shortMma16<kDtype>(sums[0][set], make_uint4(a[0], b[0], a[1], b[1]), x.x, x.y);
                shortMma16<kDtype>(sums[1][set], make_uint4(a[2], b[2], a[3], b[3]), x.z, x.w);
            }
        }
    }

    // Add to `target` [row][token], start again at zero.
    __device__ __forceinline__ void flush(float* target, int lane) {
        const int g = lane / kTileQuads, t = lane % kTileQuads;
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
#pragma unroll
            for (int row = 0; row < kLaneRows; ++row) {
                float2* to = reinterpret_cast<float2*>(target + (g + row * (kTileN / kLaneRows)) * kTokens) +
                             set * (kSetTokens / 2) + t;
                float2 sum = *to;
#pragma unroll
                for (int chain = 0; chain < kChains; ++chain) {
                    float* own = sums[chain][set] + 2 * row;
                    sum.x += own[0], sum.y += own[1];
                    own[0] = own[1] = 0.0f;
                }
                *to = sum;
            }
        }
    }
};
