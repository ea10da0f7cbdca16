// y[m][n] = scales[n] * sum_(d < taps, i < kBits) filter[i][d] * z[m][i N + ring(n - d)] + bias[n], rounded to y's type.
//
// z: what the plane product gives (quantkit/ops/trellis/op.py), of q N rows. ring: counted round within 64 rows, the last
// ring having N % 64 (quantkit/formats/trellis.py).
//
//   a block     kRings rings of one token; a thread two neighbouring rows of them, of all planes
//   shared      the planes' sums of the rings, in fp32, and the filter
//
// Sums in fp32, in the order of d, then i. Grid: (rings / kRings, M).
#include "../shared/mma.cuh"

namespace {

constexpr int kRing = QK_BLOCK_ROWS;
constexpr int kRings = QK_FILTER_RINGS;
constexpr int kRows = kRing * kRings;  // of a block
constexpr int kThreads = kRows / 2;
constexpr int kMostTaps = QK_MOST_TAPS;

}  // namespace

template <int kDtype, int kBits>
__global__ void __launch_bounds__(kThreads)
trellisFilter(const uint16* z,                   // [M, kBits N] of kDtype; written until the wait: no __restrict__
              const float* __restrict__ filter,   // [kBits, taps]
              const uint16* __restrict__ scales,  // [N] fp16
              const uint16* __restrict__ bias,    // [N] of kDtype, or null
              uint16* __restrict__ y,             // [M, N] of kDtype
              int N, int taps,
              float unit,  // what z counts in
              int ready) {  // filter, scales and bias may be read before the kernel in front ends
    __shared__ float sums[kBits][kRows];
    __shared__ float weights[kMostTaps * kBits];
    allowNextKernel();
    const int first = blockIdx.x * kRows, own = 2 * threadIdx.x, row = first + own;
    const bool inside = row < N;  // N is even, so both rows are
    if (!ready) waitForPriorKernels();
    if (threadIdx.x < taps * kBits) weights[threadIdx.x] = filter[threadIdx.x % kBits * taps + threadIdx.x / kBits];
    float scale[2] = {}, added[2] = {};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        if (inside) scale[j] = halfToFloat(scales[row + j]) * unit;
        if (inside && bias) added[j] = shortToFloat(bias[row + j], kDtype);
    }
    if (ready) waitForPriorKernels();
#pragma unroll
    for (int i = 0; i < kBits; ++i) {
        const size_t place = (size_t(blockIdx.y) * kBits + i) * N + row;
        const uint32 pair = inside ? *reinterpret_cast<const uint32*>(z + place) : 0;
        sums[i][own] = shortToFloat(uint16(pair), kDtype), sums[i][own + 1] = shortToFloat(uint16(pair >> 16), kDtype);
    }
    __syncthreads();
    const int ringFirst = own / kRing * kRing, ring = min(kRing, N - first - ringFirst), inRing = own - ringFirst;
    if (!inside) return;
    float found[2] = {};
    for (int d = 0; d < taps; ++d) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int behind = inRing + j - d, at = ringFirst + (behind < 0 ? behind + ring : behind);
#pragma unroll
            for (int i = 0; i < kBits; ++i) found[j] += weights[d * kBits + i] * sums[i][at];
        }
    }
    const uint32 low = floatToShort(found[0] * scale[0] + added[0], kDtype);
    const uint32 high = floatToShort(found[1] * scale[1] + added[1], kDtype);
    *reinterpret_cast<uint32*>(y + size_t(blockIdx.y) * N + row) = low | high << 16;
}
