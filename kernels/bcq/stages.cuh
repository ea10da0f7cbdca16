// How a step of weights gets from memory into a stage of shared memory (ring.cuh).
//
//   stage   signs [tile][plane][lane] uint4, scales [tile][segment][g][entry][2]
#pragma once
#include "tiles.cuh"
#include "../shared/mma.cuh"

constexpr int kVectorBytes = sizeof(uint4);

// The same value, which the compiler keeps instead of computing it again at every use.
__device__ __forceinline__ uint32 pinned(uint32 value) {
    asm volatile("" : "+r"(value));
    return value;
}
__device__ __forceinline__ const uint4* pinned(const uint4* pointer) {
    asm volatile("" : "+l"(pointer));
    return pointer;
}

// Sizes of a step.
template <int kBits_, int kSegment, int kScaleBits, int kStepTiles_, int kScales_ = kBits_>
struct StepShape {
    static constexpr int kBits = kBits_, kStepTiles = kStepTiles_;
    static constexpr int kScales = kScales_;  // stored for a group of a row
    static constexpr int kTileSegments = kTileK / kSegment;
    static constexpr int kStepSegments = kStepTiles * kTileSegments;
    static constexpr bool kAnyScales = kScaleBits == kAnyScaleBits;  // the sizes of scales are the most that they may be
    static constexpr int kEntryBytes = kLaneRows * (kAnyScales ? 16 : kScaleBits) / kBitsPerByte;
    static constexpr int kSignVectors = kBits * kWarpSize;        // of a tile
    static constexpr int kSignBytes = kStepTiles * kSignVectors * kVectorBytes;
    // Of the scales of one group of an n tile. bytes: of a scale.
    static __device__ __forceinline__ constexpr uint32 groupVectors(int offsets, int bytes = kEntryBytes / kLaneRows) {
        return (kScales + offsets) * bytes;
    }
};

// Where the block's tiles are and how a step gets into a stage.
template <class S>
struct Weights {
    static constexpr uint32 kMostScaleVectors = S::kStepSegments * (S::kScales + 1) * S::kEntryBytes / kLaneRows;
    const uint4* signs;   // of the block's first n tile, plus the lane
    const uint4* scales;  // of the block's first n tile
    uint32 kTiles, groups, groupVectors, lane, groupMagic, vectorMagic;
    bool linear;          // one group per segment, all stored: scales follow each other as the tiles do

    // Exact for every segment index below 2^16, that is K < 2^21.
    __device__ __forceinline__ uint32 groupOf(uint32 segment) const {
        return min(groupMagic == 0 ? segment : __umulhi(segment, groupMagic), groups - 1);
    }
    // Tiles `tile` .. of n tile `nTile`, counted through the block. Scales behind the last are zeros.
    __device__ __forceinline__ void fetch(uint32 stage, uint32 tile, uint32 nTile, uint32 count) const {
        const uint32 target = stage + lane * kVectorBytes;
        const bool whole = S::kStepTiles == 1 || count == S::kStepTiles;
        if (kMostScaleVectors > kWarpSize && whole && linear) {
            fetchSigns(target, tile);
            fetchScales(target + S::kSignBytes, tile);
        } else {
            if (whole) fetchSigns(target, tile);
            else fetchSigns(target, tile, count);
            fetchScales(target + S::kSignBytes, tile, nTile, count);
        }
    }

    // A whole step's: without a loop, as idle instructions of the assembler stand before every run of copies.
    __device__ __forceinline__ void fetchSigns(uint32 target, uint32 tile) const {
        const uint4* source = signs + size_t(tile) * S::kSignVectors;
#pragma unroll
        for (int i = 0; i < S::kStepTiles * S::kBits; ++i) {
            copyAsyncOnce16(target + i * kWarpSize * kVectorBytes, source + i * kWarpSize);
        }
    }
    __device__ __forceinline__ void fetchScales(uint32 target, uint32 tile) const {  // linear
        constexpr uint32 kLeast = S::kStepSegments * S::groupVectors(0) / (S::kAnyScales ? 2 : 1);
        const uint4* source = scales + tile * S::kTileSegments * groupVectors + lane;
#pragma unroll
        for (uint32 first = 0; first < kMostScaleVectors; first += kWarpSize) {
            if (first + kWarpSize <= kLeast || first + lane < S::kStepSegments * groupVectors) {
                copyAsync16(target + first * kVectorBytes, source + first);
            }
        }
    }

    // Of the first `count` tiles of a step.
    __device__ __forceinline__ void fetchSigns(uint32 target, uint32 tile, uint32 count) const {
        const uint4* source = signs + size_t(tile) * S::kSignVectors;
#pragma unroll 1
        for (uint32 i = 0; i < count * S::kBits; ++i) {
            copyAsyncOnce16(target + i * kWarpSize * kVectorBytes, source + i * kWarpSize);
        }
    }
    __device__ __forceinline__ void fetchScales(uint32 target, uint32 tile, uint32 nTile, uint32 count) const {
        const uint32 firstSegment = (tile - nTile * kTiles) * S::kTileSegments;
#pragma unroll 1
        for (uint32 first = 0; first < kMostScaleVectors; first += kWarpSize) {
            const uint32 vector = first + lane;
            uint32 index = tile * S::kTileSegments * groupVectors + vector;
            if (!linear) {
                const uint32 segment = vector * vectorMagic >> 16;  // vector / groupVectors
                index = (nTile * groups + groupOf(firstSegment + segment) - segment) * groupVectors + vector;
            }
            const bool present = vector < count * S::kTileSegments * groupVectors;
            if (vector < S::kStepSegments * groupVectors) {
                copyAsync16Or0(target + first * kVectorBytes, scales + (present ? index : 0), present);
            }
        }
    }
};
