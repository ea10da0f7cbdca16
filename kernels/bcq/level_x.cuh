// x as level_loop.cuh has it in shared memory: 16-bit floats, unchanged, in the fragment order of the products' B operand.
#pragma once
#include "codes.cuh"

constexpr int kProductTokens = 8;  // columns of B
constexpr int kTileHalves = 2, kHalfWords = kWordsPerTileRow / kTileHalves;

// The first elements of two pairs, and their second ones.
__device__ __forceinline__ void weave(uint32& first, uint32& second) {
    const uint32 own = first;
    first = __byte_perm(own, second, 0x5410), second = __byte_perm(own, second, 0x7632);
}

// A record holds one k tile of eight tokens:
//   [half][word s][lane = 4 token + t] uint4, one vector of padding behind a word's
//     pairs 0 .. 3 of a lane's word s (level_codes.cuh): columns 128 half + 32 s + 8 i + 2 t of the token and the next
// kSwap: pairs 1 and 2 change places. kWoven: as in levels.cuh.
template <bool kSwap, bool kWoven = false>
struct PairRecord {
    // Neighbouring lanes write neighbouring words of a token: with the padding they meet in no bank.
    static constexpr int kWordBytes = (kWarpSize + 1) * int(sizeof(uint4)), kHalf = kHalfWords * kWordBytes;
    static constexpr int kBytes = kTileHalves * kHalf;

    static __device__ __forceinline__ void write(const RawWord& x, uint32 word, unsigned char* record, uint32 token) {
        unsigned char* to = record + word * kWordBytes + token * kTileQuads * sizeof(uint4);
#pragma unroll
        for (int t = 0; t < kTileQuads; ++t) {  // pair i: registers 4 i + t
            uint32 pair[4] = {x.pairs[t], x.pairs[4 + t], x.pairs[8 + t], x.pairs[12 + t]};
            if constexpr (kWoven) weave(pair[0], pair[1]), weave(pair[2], pair[3]);
            *reinterpret_cast<uint4*>(to + t * sizeof(uint4)) =
                make_uint4(pair[0], pair[kSwap ? 2 : 1], pair[kSwap ? 1 : 2], pair[3]);
        }
    }
    // place: shared address of the lane's vectors of a record.
    static __device__ __forceinline__ uint4 load(uint32 place, int half, int word) {
        return loadShared16(place + half * kHalf + word * kWordBytes);
    }
};

// Which part of x records are made of.
struct Columns {
    int tokens, first, K;  // first: column
    bool vectors;          // every row of x is 16-byte aligned and K is a multiple of 8
};

// Records of `words` words per token of x, by all threads of the block; of tokens that are there. Not inlined: it runs
// once per pass, and the caller's loop keeps its registers. kAhead: words of a thread that are asked for together.
template <class Record, int kAhead>
__device__ __noinline__ void makePairRecords(const uint16* x, Columns part, uint32 words, unsigned char* records,
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
            const int k = part.first + word[i] * kBitsPerWord;
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

// The sums of x over the segments of every k tile of a pass: sums [k tile][segment][token] fp32, by products with ones. All
// warps of the block call it, behind a barrier.
template <class Record, int kSegment, int kTokens, int kWarps, int kDtype>
__device__ __noinline__ void sumSegments(uint32 records, uint32 setBytes, int tiles, uint32 sums) {
    constexpr int kSets = kTokens / kProductTokens, kSegments = kTileK / kSegment, kWords = kSegment / kBitsPerWord;
    constexpr uint32 kOne = kDtype == kFloat16 ? 0x3C003C00u : 0x3F803F80u;
    const uint4 ones = make_uint4(kOne, kOne, kOne, kOne);
    const uint32 lane = threadIdx.x % kWarpSize;
#pragma unroll 1
    for (int item = threadIdx.x / kWarpSize; item < tiles * kSets; item += kWarps) {
        const uint32 set = item % kSets, tile = item / kSets;
        const uint32 place = records + set * setBytes + tile * Record::kBytes + lane * sizeof(uint4);
        float parts[kWordsPerTileRow][4] = {};  // of words: two products in a row wait for each other, more would too
#pragma unroll
        for (int word = 0; word < kWordsPerTileRow; ++word) {
            const uint4 x = Record::load(place, word / kHalfWords, word % kHalfWords);
            shortMma16<kDtype>(parts[word], ones, x.x, x.y);
            shortMma16<kDtype>(parts[word], ones, x.z, x.w);
        }
#pragma unroll
        for (int segment = 0; segment < kSegments; ++segment) {
            float low = 0.0f, high = 0.0f;  // tokens 2 t and 2 t + 1
#pragma unroll
            for (int i = 0; i < kWords; ++i) low += parts[segment * kWords + i][0], high += parts[segment * kWords + i][1];
            const uint32 to = sums + ((tile * kSegments + segment) * kTokens + set * kProductTokens) * sizeof(float);
            if (lane < kTileQuads) storeShared8(to + lane * 8, __float_as_uint(low), __float_as_uint(high));
        }
    }
}
