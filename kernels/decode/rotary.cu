// Rotary embedding of the queries and keys of tokens, whose positions may differ: what stands between the product of q, k, v
// and attention.
//
//   y_i = x_i cos_i - x_(i + R/2) sin_i,   y_(i + R/2) = x_(i + R/2) cos_i + x_i sin_i      i < R / 2, of every head
//
// Values of a head behind the first R stay. Products of 16-bit values are exact in fp32, so a result is the exact
// value, rounded to fp32 and then to its type.
#include "decode.cuh"

namespace {

constexpr int kRotaryThreads = QK_ROTARY_THREADS;

}  // namespace

// Grid: (tokens, pieces of a token's heads). A thread takes two vectors that are turned into each other, or one that stays.
// Cosines, sines and positions are read before the wait: no kernel that may still run writes them.
template <int kDtype>
__global__ void __launch_bounds__(kRotaryThreads)
decodeRotate(const uint16* q,                        // [M, qHeads * D], rows qStride apart
             const uint16* k,                        // [M, kHeads * D], rows kStride apart
             const long long* __restrict__ positions,  // [M]
             const uint16* __restrict__ cosSin,      // [positions, R], cosines and then sines
             uint16* __restrict__ y,                 // [M, (qHeads + kHeads) * D], of q and then of k
             int qStride, int kStride, int qHeads, int kHeads,
             int headVectors, int halfVectors) {     // of 8 values: D / 8, R / 16
    allowNextKernel();
    const int pieces = headVectors - halfVectors, item = blockIdx.y * kRotaryThreads + threadIdx.x;
    const int head = item / pieces, piece = item - head * pieces;
    if (head >= qHeads + kHeads) return;
    const size_t token = blockIdx.x;
    const bool turns = piece < halfVectors;
    float cosines[kVectorValues], sines[kVectorValues];
    if (turns) {
        const uint4* row = reinterpret_cast<const uint4*>(cosSin) + size_t(positions[token]) * 2 * halfVectors + piece;
        unpack<kDtype>(row[0], cosines);
        unpack<kDtype>(row[halfVectors], sines);
    }
    waitForPriorKernels();
    const uint16* x = head < qHeads ? q + token * qStride : k + token * kStride;
    const uint4* from = reinterpret_cast<const uint4*>(x) + (head < qHeads ? head : head - qHeads) * headVectors + piece;
    uint4* to = reinterpret_cast<uint4*>(y) + (token * (qHeads + kHeads) + head) * headVectors + piece;
    if (!turns) {
        to[halfVectors] = from[halfVectors];
        return;
    }
    float first[kVectorValues], second[kVectorValues];
    unpack<kDtype>(from[0], first);
    unpack<kDtype>(from[halfVectors], second);
#pragma unroll
    for (int i = 0; i < kVectorValues; ++i) {
        const float one = first[i], other = second[i];
        first[i] = one * cosines[i] - other * sines[i];
        second[i] = other * cosines[i] + one * sines[i];
    }
    to[0] = pack<kDtype>(first);
    to[halfVectors] = pack<kDtype>(second);
}
