// One step of a warp in binary_gemv.cu: its share of the two tensor-core products, from shared memory to registers.
#pragma once
#include "planes.cuh"
#include "ring.cuh"

constexpr int kColumns = 8;      // of the second product
constexpr int kLaneColumns = 2;  // of a lane: 2t, 2t + 1
constexpr float kTwiceCodes = 33554432.0f;  // 2 * 2^24

// Planes whose columns stand side by side, and how many such blocks there are.
constexpr int planeBlock(int bits) { return bits > 2 ? 4 : bits; }
constexpr int planeBlocks(int bits) { return (bits + planeBlock(bits) - 1) / planeBlock(bits); }

// Sizes of an instance, and how the columns of a batch are given out: column = segment * kPlaneBlock + plane.
template <int kBits, int kSegment, int kScaleBits, int kStepTiles>
struct BinaryShape : StepShape<kBits, kSegment, kScaleBits, kStepTiles> {
    static constexpr int kPlaneBlock = planeBlock(kBits);
    static constexpr int kBlocks = planeBlocks(kBits);
    static constexpr int kSegments = kColumns / kPlaneBlock;      // of a batch
    static constexpr bool kFilled = BinaryShape::kStepSegments % kSegments == 0;  // all columns have a segment
};

// What a lane needs in every step: byte offsets of its columns' scales and segments; the second product's matrices.
template <int kBits, int kSegment, int kScaleBits, int kStepTiles>
struct Lane {
    using S = BinaryShape<kBits, kSegment, kScaleBits, kStepTiles>;
    uint32 vector, quad, scale[kLaneColumns], about[kLaneColumns], batchScales, shift;
    uint2 weights[kColumns];

    __device__ __forceinline__ Lane(int lane, int entries, uint32 groupBytes) {
        const int g = lane / kTileQuads;
        vector = pinned(lane * kVectorBytes);
        quad = pinned(lane % kTileQuads);
        shift = pinned(1 << 16);
        batchScales = pinned(S::kSegments * groupBytes);
#pragma unroll
        for (int column = 0; column < kLaneColumns; ++column) {
            const int segment = present(column) ? segmentOf(column) : 0;
            scale[column] = pinned(S::kSignBytes + segment * groupBytes +
                                   (g * entries + (quad * kLaneColumns + column) % S::kPlaneBlock) * S::kEntryBytes);
            about[column] = pinned(aboutOffset<kSegment>(segment));
        }
#pragma unroll
        for (int column = 0; column < kColumns; ++column) {
            weights[column].x = pinned(g == column ? planeWeights(quad, false) : 0);
            weights[column].y = pinned(g == column ? planeWeights(quad, true) : 0);
        }
    }
    __device__ __forceinline__ int segmentOf(int column) const {
        return (quad * kLaneColumns + column) / S::kPlaneBlock;
    }
    __device__ __forceinline__ bool present(int column) const {
        return S::kFilled || segmentOf(column) < S::kStepSegments;
    }
    __device__ __forceinline__ int plane(int column) const { return (quad * kLaneColumns + column) % S::kPlaneBlock; }
};

// Counts of sign bits over one segment: rows g and g + 8, planes 2t and 2t + 1 of the eight in `planes`.
template <int kSegment>
__device__ __forceinline__ void countBits(int (&counts)[4], uint4 signs, uint2 planes, int segment) {
    if constexpr (kSegment == kTileK) {
        binaryCount256(counts, signs, planes.x, planes.y);
    } else {
        const bool upper = segment / (kTileK / 2 / kSegment);
        binaryCount128(counts, upper ? signs.z : signs.x, upper ? signs.w : signs.y, upper ? planes.y : planes.x);
    }
}

// The planes of x inside one segment: where a half tile holds several, the other lanes' words are cleared.
template <int kSegment>
__device__ __forceinline__ uint2 segmentPlanes(uint32 first, uint32 second, int segment, int quad) {
    if constexpr (kSegment * 2 >= kTileK) {
        return make_uint2(first, second);
    } else {
        constexpr int kPerHalf = kTileK / 2 / kSegment;
        const bool inside = quad / (kTileQuads / kPerHalf) == segment % kPerHalf;
        return make_uint2(inside ? first : 0, inside ? second : 0);
    }
}

// Two counts as two fp16 denormals; by a permutation or, as those share a pipe with much else, by a multiplication.
__device__ __forceinline__ uint32 permuted(int first, int second) { return __byte_perm(first, second, 0x5410); }
__device__ __forceinline__ uint32 multiplied(int first, int second, uint32 shift) { return second * shift + first; }

// Scale the sums of one batch and add them to `sums` [token][row of the lane].
// scales, records: shared addresses of the batch's first scales (less Lane::scale) and segment (less Lane::about).
template <int kBits, int kSegment, int kScaleBits, int kStepTiles, int kTokens>
__device__ __forceinline__ void addBatch(const float (&codes)[planeBlocks(kBits)][kTokens][4],
                                         uint32 scales, int entries, uint32 records, uint32 tokenBytes,
                                         const Lane<kBits, kSegment, kScaleBits, kStepTiles>& lane,
                                         float (&sums)[kTokens][kLaneRows]) {
    using S = BinaryShape<kBits, kSegment, kScaleBits, kStepTiles>;
#pragma unroll
    for (int column = 0; column < kLaneColumns; ++column) {
        float2 about[kTokens];
#pragma unroll
        for (int m = 0; m < kTokens; ++m) about[m] = loadShared8(records + m * tokenBytes + lane.about[column]);
#pragma unroll
        for (int block = 0; block < S::kBlocks; ++block) {
            const int plane = block * S::kPlaneBlock + lane.plane(column);
            uint32 pair = 0;
            if (lane.present(column) && (kBits % S::kPlaneBlock == 0 || plane < kBits)) {
                pair = loadPair<kScaleBits>(scales + lane.scale[column] + block * S::kPlaneBlock * S::kEntryBytes);
            }
            const float scale0 = scaleValue<kScaleBits>(pair), scale1 = scaleValue<kScaleBits>(pair >> kScaleBits);
#pragma unroll
            for (int m = 0; m < kTokens; ++m) {
                const float* v = codes[block][m] + column;
                sums[m][0] += about[m].x * (scale0 * (v[0] * kTwiceCodes - about[m].y));
                sums[m][1] += about[m].x * (scale1 * (v[kLaneColumns] * kTwiceCodes - about[m].y));
            }
        }
        // The offset times the sum of x, by one lane per segment.
        if (entries > kBits && lane.present(column) && lane.plane(column) == 0) {
            const uint32 offset = loadPair<kScaleBits>(scales + lane.scale[column] + kBits * S::kEntryBytes);
#pragma unroll
            for (int m = 0; m < kTokens; ++m) {
                const float plain = about[m].x * about[m].y;
                sums[m][0] += offsetValue<kScaleBits>(offset) * plain;
                sums[m][1] += offsetValue<kScaleBits>(offset >> kScaleBits) * plain;
            }
        }
    }
}

// Add one step's product to `sums` [token][row of the lane]; each lane of a quad has a part of it.
// stage, records: shared addresses of the step's weights and of its planes, the latter for token 0.
template <int kBits, int kSegment, int kScaleBits, int kStepTiles, int kTokens>
__device__ __forceinline__ void multiplyStep(uint32 stage, int entries, uint32 records, uint32 tokenBytes,
                                             const Lane<kBits, kSegment, kScaleBits, kStepTiles>& lane,
                                             float (&sums)[kTokens][kLaneRows]) {
    using S = BinaryShape<kBits, kSegment, kScaleBits, kStepTiles>;
    constexpr int kRecord = recordBytes<kSegment>();
    const uint32 ownSigns = stage + lane.vector, ownPlanes = records + lane.vector;
    uint4 signs[kBits], x[kTokens];
    float codes[S::kBlocks][kTokens][4];
#pragma unroll
    for (int index = 0; index < S::kStepSegments; ++index) {
        const int tile = index / S::kTileSegments, segment = index % S::kTileSegments, place = index % S::kSegments;
        if (segment == 0) {
#pragma unroll
            for (int m = 0; m < kTokens; ++m) x[m] = loadShared16(ownPlanes + m * tokenBytes + tile * kRecord);
#pragma unroll
            for (int i = 0; i < kBits; ++i) {
                signs[i] = loadShared16(ownSigns + (tile * kBits + i) * kWarpSize * kVectorBytes);
            }
        }
        if (place == 0) {
#pragma unroll
            for (int i = 0; i < S::kBlocks * kTokens * 4; ++i) codes[i / (kTokens * 4)][i / 4 % kTokens][i % 4] = 0.0f;
        }
#pragma unroll
        for (int m = 0; m < kTokens; ++m) {
            int a[kBits][4], b[kBits][4];  // counts of planes 0-7 and 8-15
            const uint2 low = segmentPlanes<kSegment>(x[m].x, x[m].z, segment, lane.quad);
            const uint2 high = segmentPlanes<kSegment>(x[m].y, x[m].w, segment, lane.quad);
#pragma unroll
            for (int i = 0; i < kBits; ++i) {
                countBits<kSegment>(a[i], signs[i], low, segment);
                countBits<kSegment>(b[i], signs[i], high, segment);
            }
#pragma unroll
            for (int i = 0; i < kBits; ++i) {
                const uint2 column = lane.weights[place * S::kPlaneBlock + i % S::kPlaneBlock];
                const uint4 pairs{permuted(a[i][0], a[i][1]), permuted(a[i][2], a[i][3]),
                                  multiplied(b[i][0], b[i][1], lane.shift), multiplied(b[i][2], b[i][3], lane.shift)};
                halfMma16(codes[i / S::kPlaneBlock][m], pairs, column.x, column.y);
            }
        }
        if (place == S::kSegments - 1 || index == S::kStepSegments - 1) {
            const int first = index - place;
            const uint32 firstAbout = aboutOffset<kSegment>(first) - aboutOffset<kSegment>(0);
            const uint32 scales = stage + first / S::kSegments * lane.batchScales;
            addBatch<kBits, kSegment, kScaleBits, kStepTiles, kTokens>(codes, scales, entries,
                                                       records + firstAbout, tokenBytes, lane, sums);
        }
    }
}

// What ring.cuh runs.
template <int kBits, int kSegment, int kScaleBits_, int kTokens_, int kStepTiles>
struct BinaryProduct {
    using Shape = BinaryShape<kBits, kSegment, kScaleBits_, kStepTiles>;
    using Record = PlaneRecord<kSegment>;
    static constexpr int kScaleBits = kScaleBits_, kTokens = kTokens_, kSetTokens = 1;
    static constexpr bool kHoldsWord = kTokens == 1 && kSegment * 2 >= kTileK;  // others would spill
    const Lane<kBits, kSegment, kScaleBits, kStepTiles> own;
    float sums[kTokens][kLaneRows] = {};

    __device__ __forceinline__ BinaryProduct(int lane, int entries, uint32 groupBytes)
        : own(lane, entries, groupBytes) {}
    __device__ __forceinline__ void multiplyStep(uint32 stage, int entries, uint32 records, uint32 setBytes) {
        ::multiplyStep<kBits, kSegment, kScaleBits, kStepTiles, kTokens>(stage, entries, records, setBytes, own, sums);
    }
    __device__ __forceinline__ void flush(float* target, int lane) { flushQuads<kTokens>(sums, target, lane); }
};
