// y[M, N] = x W^T + bias on Hopper's INT8 warpgroup products (sm_90a), from planes of W as they lie and
// one byte per code of x. Planes become codes in registers, so a weight is read once, in its own bits.
//
// Formula and operand order: planes.cuh (Bipolar-INT sections 3.2, 4.1). The problem is transposed: W is the operand A, 64
// rows a consumer warpgroup, in registers; tokens are the columns of B, in shared memory.
//
//   block    kWarpgroups consumer warpgroups and one whose warps bring them what they need: of planes and of x a thread of
//            a warp each (bulk copies), of sums, scales and biases two warps
//   slot     planes of 64 rows, 1024 columns: 8 KiB a plane, one copy. Consumers take turns in the ring of slots
//   stage    kStageLines lines of 128 columns of x, 32 KiB, for all consumers
//   step     32 columns: a lane has a word of every plane of rows g and g + 8, which is 32 columns of chunk c, of the line
//            whose four steps it takes part in (CodeWords)
//   item     64 kWarpgroups rows of W x kTokens tokens, shared out as shared/items.cuh says; sums are integers
//
//   shared memory: slots | stages | slabs of the epilogue
// Limits: K c_x c_w < 2^31.
#pragma once
#include "lines.cuh"
#include "../shared/items.cuh"

constexpr int kSharedAlignment = QK_SHARED_ALIGNMENT;
constexpr int kLineSets = QK_LINE_SETS;            // lines of the item in work and of the next
constexpr int kStageBytes = QK_FUSED_STAGE_BYTES;
constexpr int kSteps = kSwizzleBytes / kWgmmaDepthBytes;
constexpr int kLineThreads = kWarpgroup / 2;       // of the warpgroup that does not multiply
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;  // of two consumers and a producer
constexpr int kWarpsOfGroup = kWarpgroup / kWarpSize;
constexpr int kSlabRow = kBlockRows + 1;           // integers of a token, and one: no bank conflicts
constexpr int kSlabIntegers = kSlabTokens * kSlabRow;

struct FusedProblem {
    const uint8* xTiles;
    const uint8* wTiles;
    uint32* partials;  // see SharedItem
    uint32* ready;
    int M, N, K, rowTiles, tokenTiles, tokenBand, wholeItems;  // tiles: of items along N and M

    __device__ __forceinline__ int stretches() const { return (K + kBitsPerLine - 1) / kBitsPerLine; }
    __device__ __forceinline__ int lines() const { return (K + kLineBytes - 1) / kLineBytes; }
    __device__ __forceinline__ ItemPlan items() const { return {rowTiles * tokenTiles, wholeItems, stretches()}; }
};

template <int kBits_, int kTokens_, int kWarpgroups_>
struct FusedShape {
    static constexpr int kBits = kBits_, kTokens = kTokens_, kWarpgroups = kWarpgroups_, kPartners = 1;
    static constexpr int kConsumers = kWarpgroups * kWarpgroup;  // threads
    static constexpr int kSlotBytes = kBits * kPlaneBytes;
    static constexpr int kTokenBytes = kTokens * kLineBytes;     // a line of all tokens
    static constexpr int kStageLines = kStageBytes / kTokenBytes;
    static constexpr int kRows = kWarpgroups * kBlockRows;
    // Lines that are expanded at once, while the products of as many run: what registers have room for. Products of few
    // columns take turns in sets of sums, as each waits for the one before with the same sums.
    static constexpr int kGroupLines = kStageLines < 4 ? kStageLines : 4, kSets = kTokens <= 64 ? 2 : 1;
    static constexpr int kSums = kTokens / 2, kGroups = kChunksPerLine / kGroupLines;
    static_assert(kGroups % 2 == 0, "a stretch ends where it began, in the first of two groups' registers");
    using Work = BlockWork<kPartners>;
    static_assert(kChunksPerLine % kStageLines == 0, "a stage is of one stretch");
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
                barrierExpect(&full[place.at], S::kSlotBytes);
                copyBulk(slots + place.at * S::kSlotBytes, p.wTiles + tile * S::kSlotBytes, S::kSlotBytes, &full[place.at]);
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

// The codes of one line for the four steps of a lane: [step][register of operand A]. row: address of row g's word of
// chunk 0, before the swizzle.
template <class S>
__device__ __forceinline__ void expandLine(uint32 row, int line, int g, uint32 (&codes)[kSteps][4]) {
    const uint32 from = row + chunkOffset(line, g);
    uint32 upper[S::kBits], lower[S::kBits];
#pragma unroll
    for (int i = 0; i < S::kBits; ++i) {
        upper[i] = loadShared4(from + i * kPlaneBytes);
        lower[i] = loadShared4(from + i * kPlaneBytes + 8 * kLineBytes);
    }
    const CodeWords<S::kBits> ofUpper(upper), ofLower(lower);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
        codes[s][0] = ofUpper.codes(2 * s), codes[s][1] = ofLower.codes(2 * s);
        codes[s][2] = ofUpper.codes(2 * s + 1), codes[s][3] = ofLower.codes(2 * s + 1);
    }
}

// The codes of a group of lines, from this one on.
template <class S>
struct GroupCodes {
    uint32 codes[S::kGroupLines][kSteps][4];

    __device__ __forceinline__ void expand(uint32 row, int first, int g) {
#pragma unroll
        for (int i = 0; i < S::kGroupLines; ++i) expandLine<S>(row, first + i, g, codes[i]);
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

    __device__ __forceinline__ uint32 address() const { return start + place.at * S::kSlotBytes + row; }
    __device__ __forceinline__ void begin() {
        if (left-- <= 0) return;
        barrierWait(&full[place.at], place.parity);
        first.expand(address(), 0, g);
    }
    // All of a slot is in registers: go on to the next.
    __device__ __forceinline__ void next() {
        __syncwarp();
        if (threadIdx.x % kWarpSize == 0) barrierArrive(&empty[place.at]);
        place.advance(S::kWarpgroups);
        begin();
    }
};

// The products of a slot's 1024 columns, or of the fewer lines that K has left.
template <class S, int kStages, int kSlots>
__device__ __forceinline__ void multiplyStretch(int* acc, StagesOfX<S, kStages>& x, SlotsOfW<S, kSlots>& w, int count) {
    if (count < kChunksPerLine) {
#pragma unroll 1
        for (int line = 0; line < count; ++line) {
            uint32 codes[kSteps][4];
            expandLine<S>(w.address(), line, w.g, codes);
            const uint32 from = x.line(line);
            productFence();
            multiplyLine<S>(acc, codes, from);
            productCommit();
            x.finish(line, count);
        }
        w.next();
        return;
    }
    GroupCodes<S> second;
#pragma unroll
    for (int group = 0; group < S::kGroups; ++group) {
        const int line = group * S::kGroupLines;
        const GroupCodes<S>& own = group % 2 ? second : w.first;
        const uint32 from = x.line(line);
        productFence();
#pragma unroll
        for (int i = 0; i < S::kGroupLines; ++i) multiplyLine<S>(acc, own.codes[i], from + i * S::kTokenBytes);
        productCommit();
        if (group + 1 == S::kGroups) w.next();  // while these products run
        else (group % 2 ? w.first : second).expand(w.address(), line + S::kGroupLines, w.g);
        x.finish(line + S::kGroupLines - 1, kChunksPerLine);
    }
}
