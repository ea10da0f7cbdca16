// What a consumer warp of a fused product (gemm.cuh) reads of the weight.
#pragma once
#include "gemm.cuh"

// What a consumer warp reads of the weight: the k tiles of its n tile in every segment.
template <class S>
struct WeightRing {
    static constexpr int kNever = 1 << 30;
    const GemmProblem& p;
    const int tile;                       // the warp's n tile within a range
    const uint32 slotBytes;
    const uint4 *planes, *scales;         // of the next tile, plus the lane; scales of the n tile where groups differ
    int index, kTile, left;               // of the segment, of the next tile; k tiles of the segment from that one on
    bool present;

    __device__ __forceinline__ WeightRing(const GemmProblem& p, int phase, int tile)
        : p(p), tile(tile), slotBytes(S::kPlaneBytes + scaleVectors() * kVectorBytes), index(-1), left(-phase) {}

    static __device__ __forceinline__ uint32 bytesOf(const GemmProblem& p) {
        return S::kSlots * (S::kPlaneBytes + p.segments * (p.entries * p.scaleBits / kBitsPerByte) * kVectorBytes);
    }
    __device__ __forceinline__ uint32 groupVectors() const { return p.entries * p.scaleBits / kBitsPerByte; }
    __device__ __forceinline__ uint32 scaleVectors() const { return p.segments * groupVectors(); }
    __device__ __forceinline__ uint32 bytes() const { return S::kSlots * slotBytes; }
    // ring: of the first slot, plus the lane's bytes.
    __device__ __forceinline__ void begin(uint32 ring) {
        enterNext();
#pragma unroll 1
        for (int i = 0; i < S::kSlots - 1; ++i) fetch(ring + i * slotBytes), passed(1);
    }
    // Tiles of this phase up to the end of the segment; so many have been fetched.
    __device__ __forceinline__ int tilesLeft() const { return (left + S::kPhases - 1) / S::kPhases; }
    __device__ __forceinline__ void passed(int count) {
        left -= count * S::kPhases;
        if (left <= 0) enterNext();
    }
    // The next segment that has a k tile for this phase.
    __device__ __forceinline__ void enterNext() {
        const typename S::Work work(p);
        Segment segment{};
        do {
            if (++index >= work.segments) {
                present = false, left = kNever;
                return;
            }
            segment = work.segment(p, index);
            left += segment.tiles;
        } while (left <= 0);
        kTile = segment.firstTile + segment.tiles - left;
        const WorkItem next = workItem<S::kPartners>(p, segment.item);
        const uint32 lane = threadIdx.x % kWarpSize;
        present = tile < next.nTiles;
        const size_t own = next.nTile + (present ? tile : 0);
        planes = p.tiles + (own * work.kTiles + kTile) * S::kPlaneVectors + lane;
        scales = p.scales + own * p.groups * groupVectors() + (p.groupMagic == 0 ? kTile * scaleVectors() + lane : 0);
    }
    // Where they follow each other as the tiles do, a vector of each lane without a branch.
    __device__ __forceinline__ void copyScales(uint32 lane, uint32 target) {
        const uint32 vectors = scaleVectors();
        const bool linear = p.groupMagic == 0;
        copyAsync16If(target, scales, present && linear && lane < vectors);
        if (!linear || vectors > kWarpSize) copyMoreScales(lane, target, vectors);
        if (linear) scales += S::kPhases * vectors;
    }
    // All others.
    __device__ __forceinline__ void copyMoreScales(uint32 lane, uint32 target, uint32 vectors) const {
        if (!present) return;
        if (p.groupMagic == 0) {
#pragma unroll 1
            for (uint32 v = kWarpSize; v < vectors; v += kWarpSize) {
                if (lane + v < vectors) copyAsync16(target + v * kVectorBytes, scales + v);
            }
            return;
        }
#pragma unroll 1
        for (uint32 v = lane; v < vectors; v += kWarpSize) {
            // Without the division where a tile is in one group; registers of planes do not carry both.
            const uint32 part = S::kCodes && p.segments == 1 ? 0 : v / groupVectors(), place = kTile * p.segments + part;
            const uint32 group = min(__umulhi(place, p.groupMagic), uint32(p.groups) - 1);
            const uint32 from = (group - part) * groupVectors() + v;  // wraps to a small number: not added in two steps
            copyAsync16(target + (v - lane) * kVectorBytes, scales + from);
        }
    }
    // Fill a slot with the next tile, or with zero signs where there is none: copies under a condition would have branches
    // between them. The caller says what has been passed.
    __device__ __forceinline__ void fetch(uint32 slot) {
#pragma unroll
        for (int i = 0; i < S::kPlaneVectors; i += kWarpSize) copyAsyncOnce16Or0(slot + i * kVectorBytes, planes + i, present);
        planes += S::kPhases * S::kPlaneVectors;
        copyScales(threadIdx.x % kWarpSize, slot + S::kPlaneBytes);
        copyCommit();
        kTile += S::kPhases;
    }
};
