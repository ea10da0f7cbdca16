// A whole fused product (gemm.cuh): the consumers' loop over segments, and who does what.
#pragma once
#include "gemm_numbers.cuh"
#include "gemm_sums.cuh"
#include "gemm_weights.cuh"

// Bytes of shared memory that sums take.
template <class S>
__device__ __forceinline__ uint32 sumBytes(const GemmProblem& p) {
    return kPhaseSums<S> + (isSplit<S>(p) ? S::Splits::kBytes : 0);
}

// Turn the consumers' sums of a segment into y, or leave them to the block that does. A spare block, whose item is the one
// behind the last, does the same with an n tile behind the last, of which nothing is written.
template <class S>
__device__ __forceinline__ void finishSegment(float* acc, const GemmProblem& p, const Consumer& own, int itemNumber,
                                              uint32 start, Mailbox& mailbox) {
    const typename S::Work work(p);
    const bool spare = itemNumber == p.items().items;
    if (!spare) {
        const SharedItem<S> shared(p, work, itemNumber);
        if (work.block > shared.first) {
            shared.leave(acc, p, work);
            return;
        }
        if (shared.last > shared.first) shared.collect(acc, p, work);
    }
    if constexpr (S::kFinishers > 1) {
        exchangePhases<S>(acc, own.phase, start);
    } else {
        if constexpr (S::kPhases > 1) addPhases<S>(acc, own.phase, start);
        if (own.phase > 0) return;
    }
    if (isSplit<S>(p)) S::Splits::exchange(acc, mailbox, start + kPhaseSums<S>);
    const WorkItem item = workItem<S::kPartners>(p, itemNumber);
    if (!spare && own.tile >= item.nTiles) return;
    const int nTile = spare ? (p.N + kTileN - 1) / kTileN : item.nTile + own.tile;
    const int firstToken = (spare ? 0 : item.tokenTile * S::kTokens) + (S::kFinishers > 1 ? own.phase * S::kOwnTokens : 0);
    if (isGated(p.activation)) {
        inTurns<S>(acc, p, firstToken, [&](int token) { writeGated<S>(acc, p, nTile, token, own.lane); });
    } else {
        inTurns<S>(acc, p, firstToken, [&](int token) { writeTile<S>(acc, p, nTile, token, own.lane); });
    }
}

template <class S, class Products>
__device__ __forceinline__ void multiplyTokens(const GemmProblem& p) {
    extern __shared__ unsigned char dynamicShared[];
    constexpr bool kNumbers = S::kNumbers && Products::kCollective, kByWarp = kNumbers || !Products::kCollective;
    const uint32 barriers = (sharedAddress(dynamicShared) + kBarrierBytes - 1) & ~uint32(kBarrierBytes - 1);
    const uint32 stages = barriers + kBarrierBytes, rings = stages + p.stages * S::kStageBytes;
    const int warp = __shfl_sync(kFullWarp, threadIdx.x / kWarpSize, 0), lane = threadIdx.x % kWarpSize;
    prepareBarriers<S, Products, kByWarp>(barriers, warp, p.stages, S::kPartners, kNumbers);
    Mailbox& mailbox = *reinterpret_cast<Mailbox*>(dynamicShared + (barriers - sharedAddress(dynamicShared)) + kMailboxPlace);
    if (isSplit<S>(p)) {
        if (threadIdx.x == 0) mailbox.prepare();
        mailbox.arrive();
    }
    if constexpr (S::kPartners > 1) meetCluster();  // what the partner's copies and arrivals find
    else __syncthreads();
    allowNextKernel();
    constexpr int kRings = S::kGroups * kGroupWarps;
    if (warp >= kRings) {
        Products::template registers<S::kGroups, false, kNumbers>();
        if (Products::copies(warp % kGroupWarps)) copyX<S, Products>(p, barriers);
        if constexpr (kNumbers) {
            const uint32 sums = rings + kRings * WeightRing<S>::bytesOf(p) + sumBytes<S>(p);
            if (warp > kRings) sumStages<S>(p, barriers, stages, sums, warp - kRings - 1, lane);
        }
        __syncwarp();
        if constexpr (S::kPartners > 1) meetCluster();  // its copies have arrived here, and its arrivals
        else if (isSplit<S>(p)) mailbox.waitForOthers();
        return;
    }

    Products::template registers<S::kGroups, true, kNumbers>();
    const Consumer own = Consumer::of<!kByWarp, S::kRowGroups>(warp, lane);
    WeightRing<S> ring(p, own.phase, own.tile);
    const uint32 tableBytes = kNumbers ? 0 : p.segments * S::kSegmentTable, allTables = rings + kRings * ring.bytes();
    uint32 ownRing = rings + warp * ring.bytes() + lane * kVectorBytes;
    keepInRegister(ownRing);  // NVRTC 13.0 builds no valid copy to an address that is partly uniform
    TilePlace<S> at(ownRing, ring.slotBytes, allTables + warp * 2 * tableBytes, tableBytes);
    ring.begin(ownRing);
    const uint32 sums = allTables + kRings * 2 * tableBytes, sumsOfX = sums + sumBytes<S>(p);
    const TableMaker<typename S::Row> maker(lane, p.entries, p.scaleBits, p.segments);
    if constexpr (!kNumbers) {
        copyWait<S::kSlots - 2>();
        __syncwarp();
        maker.make(at.scalesOf(at.slot, lane), at.tables);
    }
    StagePlace place{0, 0};
    place.advance(own.phase * S::kTileStages, p.stages);
    // The loop over k tiles, with nothing in it that a tile seldom needs: a warp waits for every branch that it takes.
    const auto repeat = [&](int count, auto multiply) {
#pragma unroll 1
        do {
            multiply();
            at.advance();
        } while (--count > 0);
    };
    // Where registers carry no count: two of many planes, many groups and many tokens are too much, and numbers of 32 tokens.
    constexpr bool kOneByOne = kNumbers ? S::kTokens > 16 : (S::kBits > kBlockPlanes) + (S::kGroups > 3) + (S::kTokens > 64) > 1;
    int k = own.phase;  // phases take the block's k tiles in turn, across its segments
#pragma unroll 1
    for (int index = 0;; ++index) {
        const typename S::Work work(p);
        if (index >= max(work.segments, 1)) break;
        const Segment segment = work.segment(p, index);
        float acc[S::kTokens / 2] = {};
#pragma unroll 1
        while (k < segment.tiles) {  // tiles up to the end of this segment, or of that from which the ring is filled
            const int count = kOneByOne ? 1 : min((segment.tiles - k + S::kPhases - 1) / S::kPhases, ring.tilesLeft());
            k += count * S::kPhases;
            if constexpr (kNumbers) {
                repeat(count, [&] {
                    copyWait<S::kSlots - 2>();
                    __syncwarp();  // this tile is there for all lanes, and all have read the slot that is filled next
                    ring.fetch(at.free);
                    multiplyNumbers<S>(acc, p, own, at.slot, barriers, stages, sumsOfX, place);
                });
            } else if constexpr (S::kBothForms && S::kTokens > 32) {  // registers carry the sums of one loop alone
                repeat(count, [&] {
                    if (p.segments > kTileWords / kChunkWords) multiplyTile<S, Products, true>(acc, p, own, at, ring, maker, barriers, stages, place);
                    else multiplyTile<S, Products>(acc, p, own, at, ring, maker, barriers, stages, place);
                });
            } else if (S::kFine || (S::kBothForms && p.segments > kTileWords / kChunkWords)) {
                repeat(count, [&] {
                    multiplyTile<S, Products, S::kFine || S::kBothForms>(acc, p, own, at, ring, maker, barriers, stages, place);
                });
            } else {
                repeat(count, [&] { multiplyTile<S, Products>(acc, p, own, at, ring, maker, barriers, stages, place); });
            }
            ring.passed(count);
        }
        k -= segment.tiles;
        if (index == 0) waitForPriorKernels();  // which may read y, write the residual or use the partials' memory
        finishSegment<S>(acc, p, own, segment.item, sums, mailbox);
    }
    if constexpr (S::kPartners > 1) meetCluster();
    else if (isSplit<S>(p) && S::kFinishers == 1 && own.phase > 0) mailbox.waitForOthers();  // the others have, for the sums
}
