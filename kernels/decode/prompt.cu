// What stands between the product of q, k, v and attention while a prompt is read: queries scaled and turned for their
// positions, keys turned and values as they are put into the cache.
//
// Every product and sum is rounded to the tensors' type, as decodeAttention does it for single tokens.
#include "../shared/activation.cuh"
#include "decode.cuh"

namespace {

constexpr int kPromptThreads = QK_PROMPT_THREADS;

// own cos + partner sin, of values that are rounded.
template <int kDtype>
__device__ __forceinline__ uint4 turned(const float (&own)[kVectorValues], const float (&partner)[kVectorValues],
                                        float sign, const uint4& cosines, const uint4& sines) {
    float by[kVectorValues], result[kVectorValues];
    unpack<kDtype>(cosines, by);
#pragma unroll
    for (int i = 0; i < kVectorValues; ++i) result[i] = rounded(own[i] * by[i], kDtype);
    unpack<kDtype>(sines, by);
#pragma unroll
    for (int i = 0; i < kVectorValues; ++i) result[i] += rounded(sign * partner[i] * by[i], kDtype);
    return pack<kDtype>(result);
}

}  // namespace

// Grid: (sequences * tokens, pieces of a token's heads). A thread takes two vectors of a head that are turned into each
// other; without `cosine` they stay. Token i of a sequence goes to entry i of its cache.
template <int kDtype>
__global__ void __launch_bounds__(kPromptThreads)
decodePrompt(const uint16* q,                   // [sequences * tokens, queryHeads * D], rows queryStride apart
             const uint16* k,                   // [sequences * tokens, kvHeads * D], likewise
             const uint16* v,
             const uint16* __restrict__ cosine,  // [angles, D], or null with sine
             const uint16* __restrict__ sine,
             uint16* __restrict__ y,            // [sequences * tokens, queryHeads * D]: the queries
             uint16* __restrict__ keys,         // [sequences, kvHeads, capacity, D]
             uint16* __restrict__ values,
             int tokens, int angles,            // angles: tokens, where all sequences have the same, or sequences * tokens
             int queryHeads, int kvHeads, int capacity,  // queryHeads: 0 where queries stay as they are
             int queryStride, int keyStride, int valueStride,
             int halfVectors,                   // of 8 values: D / 16
             float queryScale) {
    allowNextKernel();
    const int item = blockIdx.y * kPromptThreads + threadIdx.x;
    const int head = item / halfVectors, piece = item - head * halfVectors;
    if (head >= queryHeads + 2 * kvHeads) return;
    waitForPriorKernels();
    const size_t row = blockIdx.x, sequence = row / tokens, token = row - sequence * tokens;
    const bool isQuery = head < queryHeads, isValue = head >= queryHeads + kvHeads;
    const int own = isQuery ? head : isValue ? head - queryHeads - kvHeads : head - queryHeads;
    const uint16* x = isQuery ? q + row * queryStride : isValue ? v + row * valueStride : k + row * keyStride;
    const size_t place = isQuery ? row * queryHeads + own : (sequence * kvHeads + own) * capacity + token;
    const uint4* from = reinterpret_cast<const uint4*>(x) + own * 2 * halfVectors + piece;
    uint4* to = reinterpret_cast<uint4*>(isQuery ? y : isValue ? values : keys) + place * 2 * halfVectors + piece;
    const uint4 raw[2] = {from[0], from[halfVectors]};
    if (isValue || (!cosine && !isQuery)) {
        to[0] = raw[0];
        to[halfVectors] = raw[1];
        return;
    }
    float first[kVectorValues], second[kVectorValues];
    unpack<kDtype>(raw[0], first);
    unpack<kDtype>(raw[1], second);
    if (isQuery) {
#pragma unroll
        for (int i = 0; i < kVectorValues; ++i) {
            first[i] = rounded(first[i] * queryScale, kDtype);
            second[i] = rounded(second[i] * queryScale, kDtype);
        }
    }
    if (!cosine) {
        to[0] = pack<kDtype>(first);
        to[halfVectors] = pack<kDtype>(second);
        return;
    }
    const size_t angle = (row % angles) * 2 * halfVectors + piece;
    const uint4* cosines = reinterpret_cast<const uint4*>(cosine) + angle;
    const uint4* sines = reinterpret_cast<const uint4*>(sine) + angle;
    to[0] = turned<kDtype>(first, second, -1.0f, cosines[0], sines[0]);
    to[halfVectors] = turned<kDtype>(second, first, 1.0f, cosines[halfVectors], sines[halfVectors]);
}
