// How the sums of a fused product become y (gemm.cuh): added over blocks and phases in order, finished, written.
//
// Where a kernel runs behind others, the caches have theirs in the place of its code, and what is done once waits for memory
// line by line: of 1024 tokens, 7 us longer than code that is there. So sums of many tokens are written in turns by the same
// code, what is seldom needed stands apart from it, and a block without work reads it ahead for the others (GemmLayout.spare).
#pragma once
#include "gemm.cuh"

// Whether another block has part of the k tiles of this block's item.
template <class S>
__device__ __forceinline__ bool isSplit(const GemmProblem& p) { return S::kPartners == 1 && p.splits > 1; }

// Bytes of the sums that phases leave for the first.
template <class S>
constexpr uint32 kPhaseSums = (S::kPhases - 1) * (S::kConsumers / S::kPhases) * (S::kTokens / 8) * kVectorBytes;

// Add the sums of all phases, in order, to those of the first. start: shared address of where the others leave theirs.
template <class S>
__device__ __forceinline__ void addPhases(float* acc, int phase, uint32 start) {
    constexpr int kThreads = S::kConsumers / S::kPhases, kVectors = S::kTokens / 8;
    const uint32 own = start + threadIdx.x % kThreads * kVectorBytes;
    if (phase > 0) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            const uint32 place = ((phase - 1) * kVectors + i) * kThreads * kVectorBytes;
            storeShared16(own + place, make_uint4(__float_as_uint(acc[4 * i]), __float_as_uint(acc[4 * i + 1]),
                                                  __float_as_uint(acc[4 * i + 2]), __float_as_uint(acc[4 * i + 3])));
        }
    }
    namedSync(1, S::kConsumers);
    if (phase == 0) {
#pragma unroll 1
        for (int other = 0; other < S::kPhases - 1; ++other) {
#pragma unroll
            for (int i = 0; i < kVectors; ++i) {
                addBits(acc + 4 * i, loadShared16(own + (other * kVectors + i) * kThreads * kVectorBytes));
            }
        }
    }
    namedSync(1, S::kConsumers);  // before the next segment's sums take their place
}

// The same of two phases that finish half of the tokens each: sums of those become the first of the thread's.
template <class S>
__device__ __forceinline__ void exchangePhases(float* acc, int phase, uint32 start) {
    constexpr int kThreads = S::kConsumers / 2, kVectors = S::kOwnTokens / 8, kSums = 4 * kVectors;
    constexpr uint32 kPhaseBytes = kVectors * kThreads * kVectorBytes;
    const uint32 own = start + threadIdx.x % kThreads * kVectorBytes, given = own + phase * kPhaseBytes;
    const uint32 taken = own + kPhaseBytes - phase * kPhaseBytes;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        uint32 others[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float first = acc[4 * i + j], second = acc[kSums + 4 * i + j];
            others[j] = __float_as_uint(phase > 0 ? first : second), acc[4 * i + j] = phase > 0 ? second : first;
        }
        storeShared16(given + i * kThreads * kVectorBytes, make_uint4(others[0], others[1], others[2], others[3]));
    }
    namedSync(1, S::kConsumers);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) addBits(acc + 4 * i, loadShared16(taken + i * kThreads * kVectorBytes));
    namedSync(1, S::kConsumers);  // before the next segment's sums take their place
}

// Write the sums of a thread in turns, each from the same registers on. write: takes the first token of a turn.
template <class S>
constexpr int kTurns = S::kOwnTokens < 128 ? 1 : 2;
template <class S, class Write>
__device__ __forceinline__ void inTurns(float* acc, const GemmProblem& p, int firstToken, const Write& write) {
    constexpr int kSums = S::kOwnTokens / 2 / kTurns<S>;
#pragma unroll 1
    for (int turn = 0;; ++turn) {
        // the halves that the blocks of a split finish are turns
        if (kTurns<S> == 1 || !isSplit<S>(p) || S::Splits::finishes(turn * (kSums / 4))) write(firstToken);
        if (turn + 1 == kTurns<S>) return;
#pragma unroll
        for (int i = 0; i < kSums * (kTurns<S> - 1); ++i) acc[i] = acc[i + kSums];
        firstToken += 2 * kSums;
    }
}

// Eight neighbouring columns of a token in x's type. columns: of them, how many there are; aligned: whether all are, as one vector.
__device__ __forceinline__ uint4 loadColumns(const uint16* from, int columns, bool aligned) {
    if (aligned) return *reinterpret_cast<const uint4*>(from);
    uint32 word[4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        if (i < columns) word[i / 2] |= uint32(from[i]) << i % 2 * 16;
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}
// In a loop, which is little code in front of what is mostly run. The words are used up.
__device__ __forceinline__ void storeColumns(uint16* to, uint32 (&word)[4], int columns) {
#pragma unroll 1
    for (int i = 0; i < min(columns, 8); ++i) {
        to[i] = uint16(word[0]);
#pragma unroll
        for (int j = 0; j < 4; ++j) word[j] = __funnelshift_r(word[j], j < 3 ? word[j + 1] : 0u, 16);
    }
}

// Where a lane of a warp writes what of an n tile: in every step eight columns of one of 16 tokens.
template <class S>
struct LanePlace {
    static constexpr int kStepTokens = 16, kSteps = S::kOwnTokens / kTurns<S> / kStepTokens;  // of a turn
    const GemmProblem& p;
    int token, columns, place, pitch;  // of the first step; from the lane's first one on; among four lanes; of a row of y
    size_t first;                      // element of y

    __device__ __forceinline__ LanePlace(const GemmProblem& p, int nTile, int firstToken, int lane) : p(p), pitch(p.N) {
        asm volatile("" : "+r"(lane), "+r"(pitch));  // else what follows from them is kept while the next item is multiplied
        place = lane % kTileQuads;
        const int column = nTile * kTileN + place % 2 * 8;
        token = firstToken + place / 2 * 8 + lane / kTileQuads, columns = pitch - column;
        first = size_t(token) * pitch + column;
    }
    __device__ __forceinline__ bool aligned() const {
        return (size_t(p.y) | size_t(p.residual) | pitch * size_t(kShortBytes)) % kVectorBytes == 0;
    }
    __device__ __forceinline__ size_t at(int step) const { return first + size_t(step * kStepTokens) * pitch; }
    __device__ __forceinline__ bool writes(int step) const {
        const bool present = token + step * kStepTokens < p.M && columns > 0;
        return present && (kTurns<S> > 1 || !isSplit<S>(p) || S::Splits::finishes(2 * step + place / 2));
    }
};

// The epilogue of what this lane has written, other than ReLU and a residual of whole vectors: a pass of its own, as calls would
// move all sums to memory, and single elements would be much code.
template <class S>
__device__ __forceinline__ void finishTile(const GemmProblem& p, const LanePlace<S>& own, bool aligned) {
    asm volatile("" ::: "memory");  // the stores do not order loads
#pragma unroll 1
    for (int step = 0; step < LanePlace<S>::kSteps; ++step) {
        if (!own.writes(step)) continue;
        const uint4 value = loadColumns(p.y + own.at(step), own.columns, aligned);
        const uint4 kept = p.residual ? loadColumns(p.residual + own.at(step), own.columns, aligned) : uint4{};
        uint32 word[4] = {value.x, value.y, value.z, value.w};
        const uint32 addend[4] = {kept.x, kept.y, kept.z, kept.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int shift = i % 2 * 16;
            const float x = shortToFloat(uint16(word[i / 2] >> shift), S::kDtype);
            const float more = shortToFloat(uint16(addend[i / 2] >> shift), S::kDtype);
            const uint32 y = withEpilogue(x, p.activation, p.residual, more, S::kDtype);
            word[i / 2] = (word[i / 2] & ~(0xFFFFu << shift)) | y << shift;
        }
        if (aligned) store16If(true, p.y + own.at(step), word[0], word[1], word[2], word[3]);
        else storeColumns(p.y + own.at(step), word, own.columns);
    }
}

// What the sums of a lane's rows, g and g + 8, are multiplied by and what is added to them.
template <int kDtype>
struct RowTerms {
    float factor[kLaneRows], bias[kLaneRows];

    __device__ __forceinline__ RowTerms(const GemmProblem& p, int nTile, int lane) {
#pragma unroll
        for (int r = 0; r < kLaneRows; ++r) {
            const int row = r * (kTileN / kLaneRows) + lane / kTileQuads, n = nTile * kTileN + row;
            factor[r] = p.scaleBits == 8 && n < p.N ? rowFactor<8>(p.factors, nTile, row) : 1.0f;
            bias[r] = p.bias && n < p.N ? shortToFloat(p.bias[n], kDtype) : 0.0f;
        }
    }
};

// The words that a lane writes in some steps, from the 8 sums that it has of each. Sums are of two tokens and rows g, g + 8;
// transposed, of one token and two neighbouring rows; exchanged among four lanes, of eight.
template <int kDtype, int kAtOnce>
__device__ __forceinline__ void packSums(const float* acc, const RowTerms<kDtype>& terms, int place,
                                         uint32 (&word)[kAtOnce][4]) {
#pragma unroll
    for (int i = 0; i < 4 * kAtOnce; ++i) {
        const float* sum = acc + 2 * i;
        const float factor = terms.factor[i % kLaneRows], bias = terms.bias[i % kLaneRows];
        word[i / 4][i % 4] = transposed(packPair<kDtype>(sum[0] * factor + bias, sum[1] * factor + bias));
    }
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s) exchangeInQuad(word[s], place);
}

// The same of a weight whose rows g are gates and rows g + 8 ups: silu(gate) * up, eight columns of y. In every step of 32 tokens
// a lane writes those of one. firstToken: of a turn.
template <class S>
__device__ __forceinline__ void writeGated(const float* acc, const GemmProblem& p, int nTile, int firstToken, int lane) {
    constexpr int kDtype = S::kDtype, kEights = S::kOwnTokens / kTurns<S> / 8, kAtOnce = 4;
    static_assert(kGatedRows == kTileN / kLaneRows, "a lane has the up of its gate");
    const RowTerms<kDtype> terms(p, nTile, lane);
    int pitch = p.N / 2, place = lane % kTileQuads;
    asm volatile("" : "+r"(place), "+r"(pitch));  // as in LanePlace
    const int column = nTile * kGatedRows, tokens = p.M - firstToken;
#pragma unroll
    for (int first = 0; first < kEights; first += kAtOnce) {
        if (first * 8 >= tokens) break;
        uint32 word[kAtOnce] = {};
#pragma unroll
        for (int i = 0; i < kAtOnce && first + i < kEights; ++i) {
            const float* sum = acc + 4 * (first + i);
            const uint32 gate = packPair<kDtype>(sum[0] * terms.factor[0] + terms.bias[0], sum[1] * terms.factor[0] + terms.bias[0]);
            const uint32 up = packPair<kDtype>(sum[2] * terms.factor[1] + terms.bias[1], sum[3] * terms.factor[1] + terms.bias[1]);
            const float low = silu(shortToFloat(uint16(gate), kDtype)), high = silu(shortToFloat(uint16(gate >> 16), kDtype));
            word[i] = transposed(multiplyPairs<kDtype>(packPair<kDtype>(low, high), up));
        }
        exchangeInQuad(word, place);
        const int eight = first + place, token = eight * 8 + lane / kTileQuads;
        const bool writes = eight < kEights && token < tokens && column < pitch &&
                            (kTurns<S> > 1 || !isSplit<S>(p) || S::Splits::finishes(eight));
        store16If(writes, p.y + size_t(firstToken + token) * pitch + column, word[0], word[1], word[2], word[3]);
    }
}

// A warp's sums of an n tile and a turn -> y, those that this block finishes. Some steps at once, so that none waits for its own
// last instruction; residuals are asked for ahead, where registers carry them. Both would be waits of the tensor cores.
template <class S>
__device__ __forceinline__ void writeTile(const float* acc, const GemmProblem& p, int nTile, int firstToken, int lane) {
    constexpr int kDtype = S::kDtype, kSteps = LanePlace<S>::kSteps;
    constexpr int kMost = S::kGroups < 4 ? 4 : 2, kAtOnce = kSteps < kMost ? kSteps : kMost;
    constexpr int kAsked = S::kTokens > 128 ? 2 * kAtOnce : kAtOnce;
    const LanePlace<S> own(p, nTile, firstToken, lane);
    const bool aligned = own.aligned(), plain = p.activation == kNoActivation || p.activation == kRelu;
    const bool adds = p.residual && plain && aligned;
    const RowTerms<kDtype> terms(p, nTile, lane);
    uint4 kept[kAsked] = {};
    const auto ask = [&](int first, int end) {
#pragma unroll
        for (int step = first; step < end && step < kSteps; ++step) {
            if (adds && own.writes(step)) kept[step % kAsked] = *reinterpret_cast<const uint4*>(p.residual + own.at(step));
        }
    };
    ask(0, kAsked - kAtOnce);
    const int tokens = p.M - firstToken;
#pragma unroll
    for (int first = 0; first < kSteps; first += kAtOnce) {
        if (LanePlace<S>::kStepTokens * first >= tokens) break;
        ask(first + kAsked - kAtOnce, first + kAsked);
        uint32 word[kAtOnce][4];
        packSums<kDtype>(acc + 8 * first, terms, own.place, word);
        if (p.activation == kRelu) {
#pragma unroll
            for (int i = 0; i < 4 * kAtOnce; ++i) word[i / 4][i % 4] = largestPairs<kDtype, false>(word[i / 4][i % 4], 0);
        }
        if (adds) {
#pragma unroll
            for (int s = 0; s < kAtOnce; ++s) {
                const uint4& more = kept[(first + s) % kAsked];
                const uint32 addend[4] = {more.x, more.y, more.z, more.w};
#pragma unroll
                for (int i = 0; i < 4; ++i) word[s][i] = addPairs<kDtype>(addend[i], word[s][i]);
            }
        }
        if (aligned) {
#pragma unroll
            for (int s = 0; s < kAtOnce; ++s) {
                const int step = first + s;
                store16If(own.writes(step), p.y + own.at(step), word[s][0], word[s][1], word[s][2], word[s][3]);
            }
        } else {
#pragma unroll
            for (int s = 0; s < kAtOnce; ++s) {
                if (own.writes(first + s)) storeColumns(p.y + own.at(first + s), word[s], own.columns);
            }
        }
    }
    if (!plain || (p.residual && !aligned)) finishTile<S>(p, own, aligned);
}
