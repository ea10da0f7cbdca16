// y[M, N] = x W^T + bias on Hopper's INT8 warpgroup products (sm_90a), from planes of W as they lie and
// one byte per code of x. Planes become codes in registers, so a weight is read once, in its own bits.
//
// Formula and operand order: planes.cuh (Bipolar-INT sections 3.2, 4.1); scale codes: scales.cuh. The problem is transposed: W is
// the operand A, 64 rows a consumer warpgroup, in registers; tokens are the columns of B, in shared memory.
//
//   block    kWarpgroups consumer warpgroups and one whose warps bring them what they need: of planes and of x a thread of
//            a warp each (bulk copies), of sums, scales and biases two warps
//   slot     planes of 64 rows, 1024 columns: 8 KiB a plane, one copy; and their scale codes. Consumers take turns in the ring
//   stage    kStageLines lines of 128 columns of x, 32 KiB, for all consumers
//   step     32 columns: a lane has a word of every plane of rows g and g + 8, which is 32 columns of chunk c, of the line
//            whose four steps it takes part in (CodeWords)
//   item     64 kWarpgroups rows of W x kTokens tokens, shared out as shared/items.cuh says; sums are integers
//   splits   or the two blocks of a cluster share the k tiles of an item, and each finishes half of its tokens (splits.cuh)
//
//   shared memory: stages | slots | sums of the other split
// Limits: K c_x c_w < 2^31.
#pragma once
#include "lines.cuh"
#include "../shared/splits.cuh"

constexpr int kSharedAlignment = QK_SHARED_ALIGNMENT;
constexpr int kLineSets = QK_LINE_SETS;            // lines of the item in work and of the next
constexpr int kStageBytes = QK_FUSED_STAGE_BYTES;
constexpr int kSteps = kSwizzleBytes / kWgmmaDepthBytes;
constexpr int kLineThreads = kWarpgroup / 2;       // of the warpgroup that does not multiply
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;  // of two consumers and a producer
constexpr int kWarpsOfGroup = kWarpgroup / kWarpSize;

struct FusedProblem {
    const uint8* xTiles;
    const uint8* wTiles;
    const uint8* scaleTiles;  // where slots have scale codes, see kScaleBytes
    uint32* partials;  // see SharedItem
    uint32* ready;
    int M, N, K, rowTiles, tokenTiles, tokenBand, wholeItems;  // tiles: of items along N and M
    int splits;                                                // 1, or 2 blocks of a cluster for each item

    __device__ __forceinline__ int stretches() const { return (K + kBitsPerLine - 1) / kBitsPerLine; }
    __device__ __forceinline__ int lines() const { return (K + kLineBytes - 1) / kLineBytes; }
    __device__ __forceinline__ ItemPlan items() const { return {rowTiles * tokenTiles, wholeItems, stretches(), splits}; }
};

template <int kBits_, int kTokens_, int kWarpgroups_, bool kCoded_>
struct FusedShape {
    static constexpr int kBits = kBits_, kTokens = kTokens_, kWarpgroups = kWarpgroups_, kPartners = 1;
    static constexpr bool kCoded = kCoded_;                      // whether lines have scale codes
    static constexpr int kConsumers = kWarpgroups * kWarpgroup;  // threads
    static constexpr int kPlanesBytes = kBits * kPlaneBytes, kScaleBytes = kCoded ? kChunksPerLine * kBlockRows : 0;
    static constexpr int kSlotBytes = kPlanesBytes + kScaleBytes;
    static constexpr int kTokenBytes = kTokens * kLineBytes;     // a line of all tokens
    static constexpr int kStageLines = kStageBytes / kTokenBytes;
    static constexpr int kRows = kWarpgroups * kBlockRows;
    // Lines that are expanded at once, while the products of as many run: what registers have room for. Products of few
    // columns take turns in sets of sums, as each waits for the one before with the same sums.
    static constexpr int kGroupLines = kStageLines < 4 ? kStageLines : 4, kSets = kTokens <= 64 ? 2 : 1;
    static constexpr int kSums = kTokens / 2, kGroups = kChunksPerLine / kGroupLines;
    static_assert(kGroups % 2 == 0, "a stretch ends where it began, in the first of two groups' registers");
    using Work = BlockWork<kPartners>;
    static constexpr bool kSplits = kTokens <= QK_SPLIT_TOKENS;  // whether K may be split
    using Splits = SplitSums<kTokens / 2, kConsumers>;
    static_assert(kChunksPerLine % kStageLines == 0, "a stage is of one stretch");
    static constexpr bool kTurns = kWarpgroups == 2;  // see Turns
};

// A place in a ring of kCount, and the parity of its barriers' phase.
template <int kCount>
struct RingPlace {
    int at;
    uint32 parity;
    __device__ __forceinline__ void advance(int by = 1) {
        if ((at += by) >= kCount) at -= kCount, parity ^= 1;
    }
};

// An item's first row block of 64 and its first token.
struct FusedPlace {
    int block, token;
};
template <class S>
__device__ __forceinline__ FusedPlace fusedPlace(const FusedProblem& p, int item) {
    const ItemPlace place = itemPlace(item, p.rowTiles, p.tokenTiles, p.tokenBand);
    return {place.range * S::kWarpgroups, place.tokenTile * S::kTokens};
}

// By one thread. Weights do not depend on what ran before.
template <class S, int kSlots>
__device__ __forceinline__ void copyPlanes(const FusedProblem& p, uint32 slots, uint64* full, uint64* empty) {
    const int lastBlock = (p.N - 1) / kBlockRows;
    const typename S::Work work(p);
    RingPlace<kSlots> place{0, 1};
    for (int index = 0; index < work.segments; ++index) {
        const Segment segment = work.segment(p, index);
        const int first = fusedPlace<S>(p, segment.item).block;
        for (int k = segment.firstTile; k < segment.firstTile + segment.tiles; ++k) {
#pragma unroll
            for (int c = 0; c < S::kWarpgroups; ++c, place.advance()) {
                const size_t tile = size_t(min(first + c, lastBlock)) * work.kTiles + k;
                barrierWait(&empty[place.at], place.parity);
                const uint32 to = slots + place.at * S::kSlotBytes;
                barrierExpect(&full[place.at], S::kSlotBytes);
                copyBulk(to, p.wTiles + tile * S::kPlanesBytes, S::kPlanesBytes, &full[place.at]);
                if constexpr (S::kScaleBytes > 0) {
                    copyBulk(to + S::kPlanesBytes, p.scaleTiles + tile * S::kScaleBytes, S::kScaleBytes, &full[place.at]);
                }
            }
        }
    }
}

// By one thread: lines of x, token blocks of 64 rows or the half of one.
template <class S, int kStages>
__device__ __forceinline__ void copyX(const FusedProblem& p, uint32 stages, uint64* full, uint64* empty) {
    constexpr int kRows = S::kTokens < kBlockRows ? S::kTokens : kBlockRows, kBlocks = S::kTokens / kRows;
    constexpr uint32 kBytes = kRows * kLineBytes;
    const int lastBlock = (p.M - 1) / kBlockRows, lines = p.lines();
    const typename S::Work work(p);
    RingPlace<kStages> place{0, 1};
    for (int index = 0; index < work.segments; ++index) {
        const Segment segment = work.segment(p, index);
        const int token = fusedPlace<S>(p, segment.item).token;
        const uint8* from[kBlocks];
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
            const int block = min(token / kBlockRows + b, lastBlock);
            from[b] = p.xTiles + size_t(block) * lines * kPlaneBytes + token % kBlockRows * kLineBytes;
        }
        const int end = min((segment.firstTile + segment.tiles) * kChunksPerLine, lines);
        for (int line = segment.firstTile * kChunksPerLine; line < end; line += S::kStageLines, place.advance()) {
            const int count = min(S::kStageLines, end - line);
            const uint32 to = stages + place.at * kStageBytes;
            barrierWait(&empty[place.at], place.parity);
            barrierExpect(&full[place.at], count * S::kTokenBytes);
            for (int i = 0; i < count; ++i) {
#pragma unroll
                for (int b = 0; b < kBlocks; ++b) {
                    copyBulk(to + i * S::kTokenBytes + b * kBytes, from[b] + size_t(line + i) * kPlaneBytes, kBytes,
                             &full[place.at]);
                }
            }
        }
    }
}

// A lane's word of every plane of a line, of row g (kLower: of row g + 8). row: address of row g's word of chunk 0, before
// the swizzle.
template <int kBits, bool kLower>
__device__ __forceinline__ CodeWords<kBits> wordsOfLine(uint32 row, int line, int g) {
    uint32 planes[kBits];
#pragma unroll
    for (int i = 0; i < kBits; ++i) {
        planes[i] = loadShared4(row + chunkOffset(line, g) + i * kPlaneBytes + (kLower ? 8 * kLineBytes : 0));
    }
    return CodeWords<kBits>(planes);
}

// The codes of a line of a lane, by steps: registers of operand A. slot: its address; row: offset of the word of row g in it.
template <class S>
__device__ __forceinline__ void expandLine(uint32 slot, uint32 row, int line, int g, uint32 (&codes)[kSteps][4]) {
    const CodeWords<S::kBits> upper = wordsOfLine<S::kBits, false>(slot + row, line, g);
    const CodeWords<S::kBits> lower = wordsOfLine<S::kBits, true>(slot + row, line, g);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
        codes[s][0] = upper.codes(2 * s), codes[s][1] = lower.codes(2 * s);
        codes[s][2] = upper.codes(2 * s + 1), codes[s][3] = lower.codes(2 * s + 1);
    }
    if constexpr (S::kCoded) {
        const int place = scalePlace(row / (16 * kLineBytes) * 16 + g);
        const uint32 pair = loadShared2(slot + S::kPlanesBytes + line * kBlockRows + place);  // of rows g and g + 8
        const ScaleCode<S::kBits> ofUpper(pair & 0xFF), ofLower(pair >> 8);
#pragma unroll
        for (int s = 0; s < kSteps; ++s) {
            codes[s][0] = ofUpper.bytes(codes[s][0]), codes[s][1] = ofLower.bytes(codes[s][1]);
            codes[s][2] = ofUpper.bytes(codes[s][2]), codes[s][3] = ofLower.bytes(codes[s][3]);
        }
    }
}

// The codes of a group of lines, from this one on.
template <class S>
struct GroupCodes {
    uint32 codes[S::kGroupLines][kSteps][4];

    __device__ __forceinline__ void expand(uint32 slot, uint32 row, int first, int g) {
#pragma unroll
        for (int i = 0; i < S::kGroupLines; ++i) expandLine<S>(slot, row, first + i, g, codes[i]);
    }
};

// The products of a line: codes of W, [step][register], and a line of x at this address.
template <class S>
__device__ __forceinline__ void multiplyLine(int* acc, const uint32 (&codes)[kSteps][4], uint32 x) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
        RegisterBytesProduct<S::kTokens>::add(acc + s % S::kSets * S::kSums, codes[s][0], codes[s][1], codes[s][2],
                                              codes[s][3], operandDescriptor(x + s * kWgmmaDepthBytes));
    }
}

// Two consumer warpgroups take turns with their products. Left alone they stay in step: both multiply, then both do what
// is to be done with sums and planes, while the tensor cores wait. A turn is handed on when its products are queued.
template <class S>
struct Turns {
    static constexpr int kFirstBarrier = 1 + kLineSets;  // behind those of lines
    int own;

    __device__ __forceinline__ void begin() const {
        if (own == 1) handOn();
    }
    __device__ __forceinline__ void wait() const {
        if constexpr (S::kTurns) namedSync(kFirstBarrier + own, S::kConsumers);
    }
    __device__ __forceinline__ void handOn() const {
        if constexpr (S::kTurns) namedArrive(kFirstBarrier + 1 - own, S::kConsumers);
    }
    // Behind the last products: what was handed on to the first warpgroup is taken.
    __device__ __forceinline__ void end() const {
        if (own == 0) wait();
    }
};

// The stages of x as a consumer warpgroup sees them.
template <class S, int kStages>
struct StagesOfX {
    uint32 start;
    uint64 *full, *empty;
    bool signals;  // whether this thread says that a stage is read
    RingPlace<kStages> place{0, 0};

    // The address of a line of the stretch, which is there.
    __device__ __forceinline__ uint32 line(int line) const {
        if (line % S::kStageLines == 0) barrierWait(&full[place.at], place.parity);
        return start + place.at * kStageBytes + line % S::kStageLines * S::kTokenBytes;
    }
    // Behind all products of lines up to this one, of so many.
    __device__ __forceinline__ void finish(int line, int count) {
        productWait<0>();
        if ((line + 1) % S::kStageLines != 0 && line + 1 != count) return;
        if (signals) barrierArrive(&empty[place.at]);
        place.advance();
    }
};

// The slots of planes as a warp of a consumer warpgroup sees them, and the codes of the next group of lines.
template <class S, int kSlots>
struct SlotsOfW {
    uint32 start, row;  // row: offset of the word of row g, see expandLine
    uint64 *full, *empty;
    int g;
    int left;  // stretches of this block that have not begun
    RingPlace<kSlots> place;
    GroupCodes<S> first;  // of the stretch that comes next

    __device__ __forceinline__ uint32 slot() const { return start + place.at * S::kSlotBytes; }
    __device__ __forceinline__ void begin() {
        if (left-- <= 0) return;
        barrierWait(&full[place.at], place.parity);
        first.expand(slot(), row, 0, g);
    }
    // All of a slot is in registers: go on to the next.
    __device__ __forceinline__ void next() {
        __syncwarp();
        if (threadIdx.x % kWarpSize == 0) barrierArrive(&empty[place.at]);
        place.advance(S::kWarpgroups);
        begin();
    }
};
