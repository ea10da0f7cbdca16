// A k tile of a fused product (gemm.cuh) of a weight in equal steps whose groups are wide, for few tokens on warpgroups:
// products of numbers, whose sums meet step and offset once half a tile.
//
//   sum_k x (step (2 c - C) + offset) = step sum_k x (2 c + n) + (offset - step (C + n)) sum_k x
//
// n as in grid_step.cuh. The sums of x are made by those warps of the copying group that copy nothing, by products with
// ones. Of fp16 all numbers stand at the last place, so that they have sums in common. A stage of x is a k tile.
//
//   sums of x    [stage][half of a tile][token] fp32; a third row of barriers says that they are there
#pragma once
#include "gemm_products.cuh"
#include "gemm_tile.cuh"

constexpr int kSummingWarps = kGroupWarps - 1, kSetTokens = 8, kHalves = 2;
constexpr int kHalfSteps = kPanelK * kTilePanels / kHalves / 16;  // products of 16 columns

template <class S>
struct SumsOfX {
    static constexpr int kHalfBytes = S::kTokens * int(sizeof(float)), kStageBytes = kHalves * kHalfBytes;
    static __device__ __forceinline__ uint32 barrier(uint32 barriers, int stage) {
        return barriers + (2 * kMostStages + stage) * sizeof(uint64);
    }
};

// By one of kSummingWarps: sums of x, of which each takes a filling of a stage in turn. It waits for the others' fillings too,
// as the parity of a barrier tells two of them apart and no more. 16 tokens of half a tile are the operand A of products with
// ones; several sums take turns, as each product waits for the one before with the same sums.
template <class S>
__device__ __forceinline__ void sumStages(const GemmProblem& p, uint32 barriers, uint32 stages, uint32 sums, int warp,
                                          int lane) {
    using Sums = SumsOfX<S>;
    constexpr int kSets = S::kTokens / kTileN, kParts = 4 / (kSets * kHalves);
    constexpr uint32 kOne = S::kDtype == kFloat16 ? 0x3C003C00u : 0x3F803F80u;
    const int fillings = typename S::Work(p).allTiles();
    StagePlace place{0, 0};
    // Lane l points at token l % 16: of columns 0-7 and 8-15.
    const uint32 row = lane % kTileN * kPanelRowBytes + (lane / kTileN ^ lane % kPanelChunks) * kVectorBytes;
#pragma unroll 1
    for (int filling = 0, turn = warp; filling < fillings; ++filling, place.advance(1, p.stages)) {
        barrierWait(barriers + place.stage * sizeof(uint64), place.parity);
        if (turn-- > 0) continue;
        turn = kSummingWarps - 1;
        const uint32 from = stages + place.stage * S::kStageBytes + row;
        float sum[kSets][kHalves][kParts][4] = {};
#pragma unroll
        for (int step = 0; step < kHalfSteps; ++step) {
#pragma unroll
            for (int i = 0; i < kSets * kHalves; ++i) {
                const int set = i / kHalves, half = i % kHalves, panel = half * kTilePanels / kHalves + step / 4;
                const uint32 at = (panel * S::kTokens + set * kTileN) * kPanelRowBytes;
                const uint4 x = loadMatrices((from ^ step % 4 * 2 * kVectorBytes) + at);
                shortMma16<S::kDtype>(sum[set][half][step % kParts], x, kOne, kOne);
            }
        }
        const uint32 to = sums + place.stage * Sums::kStageBytes + lane / kTileQuads * sizeof(float);
#pragma unroll
        for (int i = 0; i < kSets * kHalves * kLaneRows; ++i) {  // of tokens g and g + 8, the same in all columns
            const int set = i / kLaneRows / kHalves, half = i / kLaneRows % kHalves, upper = i % kLaneRows;
            float all = 0.0f;
#pragma unroll
            for (int part = 0; part < kParts; ++part) all += sum[set][half][part][2 * upper];
            const uint32 own = to + half * Sums::kHalfBytes + (set * kTileN + upper * kSetTokens) * sizeof(float);
            if (lane % kTileQuads == 0) storeShared4(own, __float_as_uint(all));
        }
        __syncwarp();
        if (lane == 0) barrierArrive(Sums::barrier(barriers, place.stage));
    }
}

// Add the products of half a tile to the sums. xSums: shared address of those of x for the lane's tokens.
template <class S>
__device__ __forceinline__ void addHalf(float* acc, const float* part, const NumberScales<S::kBits, S::kDtype>& scales,
                                        uint32 xSums) {
#pragma unroll
    for (int j = 0; j < S::kTokens / kSetTokens; ++j) {
        const float2 x = loadShared8(xSums + j * kSetTokens * sizeof(float));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float& sum = acc[4 * j + i];
            sum = fmaf(scales.step[i / 2], part[4 * j + i], fmaf(scales.rest[i / 2], i % 2 ? x.y : x.x, sum));
        }
    }
}

// The words of half a tile of rows g and g + 8.
template <int kBits>
struct HalfTileWords {
    uint32 upper[kBits], lower[kBits];
};

// The pairs of numbers of kTurnWords words of rows g and g + 8, whose products run while as many are expanded.
template <int kBits, int kDtype, int kTurnWords>
struct TurnNumbers {
    uint32 upper[kTurnWords][kWordPairs], lower[kTurnWords][kWordPairs];

    // words: from the slot of the tile plus the lane on; kept from turn to turn.
    __device__ __forceinline__ void expand(HalfTileWords<kBits>& words, uint32 slot, int turn) {
        const int first = turn * kTurnWords % kChunkWords;
        if (first == 0) {
#pragma unroll
            for (int i = 0; i < kBits; ++i) {
                const uint2 two = loadSharedWords(slot + i * kWarpSize * kVectorBytes + turn * kTurnWords / kChunkWords * 8);
                words.upper[i] = two.x, words.lower[i] = two.y;
            }
        }
#pragma unroll
        for (int i = 0; i < kTurnWords; ++i) {
            numbersOf<kBits, kDtype, true>(words.upper, first + i, upper[i]);
            numbersOf<kBits, kDtype, true>(words.lower, first + i, lower[i]);
#pragma unroll
            for (int pair = 0; pair < kWordPairs; ++pair) {  // now, not where products take them
                keepInRegister(upper[i][pair]);
                keepInRegister(lower[i][pair]);
            }
        }
    }
};

// Products with a stage of x whose descriptor is known to be the warp's: of a lane's register, put together for each product, it
// would take three instructions more.
template <class S>
struct NumberProducts : WarpgroupProducts<S::kDtype, S::kTokens> {
    __device__ __forceinline__ void take(uint32 shared) { this->start = operandDescriptor(ofWarp(shared)); }
};

// Add the products of a k tile to the sums. xSums: shared address of the sums of x.
template <class S>
__device__ __forceinline__ void multiplyNumbers(float* acc, const GemmProblem& p, const Consumer& own, uint32 slot,
                                                uint32 barriers, uint32 stages, uint32 xSums, StagePlace& place) {
    using Sums = SumsOfX<S>;
    constexpr bool kAdds = S::Expansion::kAdds;
    constexpr int kLaneBytes = kAdds ? 8 : 4, kGroupBytes = kTileN / kLaneRows * kLaneBytes;  // of scales
    static_assert(S::kTileStages == 1, "a stage is a k tile");
    constexpr int kTurnWords = (S::kDtype == kBfloat16 || S::kGroups > 6) && S::kTokens > 16 ? 1 : 2;  // what registers carry
    constexpr int kTurns = kTileWords / kTurnWords, kHalfTurns = kTurns / kHalves;
    const uint32 scales = TilePlace<S>::scalesOf(slot, own.lane) + own.lane / kTileQuads * kLaneBytes;
    const uint32 ofLane = xSums + place.stage * Sums::kStageBytes + own.lane % kTileQuads * 2 * sizeof(float);
    // With sums for each half, where registers carry them, a turn waits for the products of the one before it alone, and a half
    // is added while the next one's run.
    constexpr int kParts = S::kGroups <= 3 ? kHalves : 1;
    TurnNumbers<S::kBits, S::kDtype, kTurnWords> numbers[2];
    HalfTileWords<S::kBits> words;
    float part[kParts][S::kTokens / 2];
    NumberProducts<S> products;
    numbers[0].expand(words, slot, 0);
    barrierWait(barriers + place.stage * sizeof(uint64), place.parity);
    products.take(stages + place.stage * S::kStageBytes);
    const auto meetSums = [&](int half) {
        if (half == 0) barrierWait(Sums::barrier(barriers, place.stage), place.parity);
        const uint32 from = scales + half * p.segments / kHalves * kGroupBytes;
        const uint2 stored = kAdds ? loadSharedWords(from) : make_uint2(loadShared4(from), 0);
        addHalf<S>(acc, part[half % kParts], NumberScales<S::kBits, S::kDtype>(stored), ofLane + half * Sums::kHalfBytes);
    };
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
        float* sums = part[turn / kHalfTurns % kParts];
        products.fence();
#pragma unroll
        for (int i = 0; i < kTurnWords; ++i) {
            const int word = turn * kTurnWords + i, panel = word / kPanelWords, step = word % kPanelWords * 2;
            const auto& a = numbers[turn % 2].upper[i];
            const auto& b = numbers[turn % 2].lower[i];
            if (word % kChunkWords == 0) products.template add<false>(sums, a[0], b[0], a[1], b[1], panel, step);
            else products.add(sums, a[0], b[0], a[1], b[1], panel, step);
            products.add(sums, a[2], b[2], a[3], b[3], panel, step + 1);
        }
        products.commit();
        const bool last = turn + 1 == kTurns, waits = kParts == 1 || last;
        const int ended = waits ? turn + 1 : turn;  // turns whose products have ended
        if (!waits && ended > 0) products.template wait<1>();
        if (!last) numbers[(turn + 1) % 2].expand(words, slot, turn + 1);
        if (waits) products.template wait<0>();
        if (ended > 0 && ended % kHalfTurns == 0) meetSums(ended / kHalfTurns - 1);
    }
    const uint32 read = barriers + (kMostStages + place.stage) * sizeof(uint64);
    place.advance(S::kPhases, p.stages);
    __syncwarp();
    if (own.signals) barrierArrive(read);
}
