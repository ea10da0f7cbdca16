// rotateInputs: y = x Q rounded to x's type, Q the Hadamard blocks of formats/hadamard.py.
//
// A warp takes a run of 256 columns of one row, a lane 8 neighbouring columns of it: one load of 16 bytes (two in fp32),
// additions within the lane and between lanes, one store. Columns behind K are 0 and in blocks of their own, as K is a
// multiple of the width of a block. Grid: enough warps for all runs of all rows, the runs of a row one after another.
#include "../shared/hadamard.cuh"
#include "../shared/mma.cuh"

namespace {

constexpr int kWarps = QK_ROTATE_WARPS;
constexpr int kRunColumns = kWarpSize * kHadamardColumns;

// A lane's columns as they are in memory.
template <int kDtype>
struct Lane {
    static constexpr int kVectors = kDtype == kFloat32 ? 2 : 1;
    uint4 vector[kVectors];

    __device__ __forceinline__ const uint32* words() const { return reinterpret_cast<const uint32*>(vector); }
    __device__ __forceinline__ uint32* words() { return reinterpret_cast<uint32*>(vector); }

    __device__ __forceinline__ float value(int i) const {
        if constexpr (kDtype == kFloat32) return __uint_as_float(words()[i]);
        return shortToFloat(uint16(words()[i / 2] >> (i % 2 * 16)), kDtype);
    }

    __device__ __forceinline__ void set(const float (&v)[kHadamardColumns]) {
#pragma unroll
        for (int i = 0; i < kHadamardColumns; i++) {
            if constexpr (kDtype == kFloat32) {
                words()[i] = __float_as_uint(v[i]);
            } else if (i % 2 == 0) {
                words()[i / 2] = floatToShort(v[i], kDtype) | uint32(floatToShort(v[i + 1], kDtype)) << 16;
            }
        }
    }
};

}  // namespace

// width: of a block of Q, 8 to 256; a divisor of K. root: 1 / sqrt(width) rounded. x and y begin at multiples of 16
// bytes. runs: of all rows, M * ceil(K / 256).
template <int kDtype>
__global__ void __launch_bounds__(kWarps * kWarpSize)
    rotateInputs(const uint4* x,         // [M, K] of kDtype; written until the wait, so not __restrict__
                 uint4* __restrict__ y,  // [M, K] of kDtype
                 int K, int runs, int width, float root) {
    allowNextKernel();
    const int lane = threadIdx.x % kWarpSize;
    const int run = blockIdx.x * kWarps + threadIdx.x / kWarpSize;
    if (run >= runs) return;  // the whole warp
    const int runsOfRow = (K + kRunColumns - 1) / kRunColumns;
    const int column = run % runsOfRow * kRunColumns + lane * kHadamardColumns;
    const bool inside = column < K;
    const uint32 signs = hadamardSigns(lane);
    const size_t place = (size_t(run / runsOfRow) * K + column) / kHadamardColumns * Lane<kDtype>::kVectors;

    waitForPriorKernels();  // from here on x may be read and y written
    Lane<kDtype> own;
#pragma unroll
    for (int i = 0; i < Lane<kDtype>::kVectors; i++) own.vector[i] = inside ? x[place + i] : make_uint4(0, 0, 0, 0);
    float v[kHadamardColumns];
#pragma unroll
    for (int i = 0; i < kHadamardColumns; i++) v[i] = signs >> i & 1 ? -own.value(i) : own.value(i);
    rotateRun(v, lane, width, root);
    own.set(v);
    if (!inside) return;
#pragma unroll
    for (int i = 0; i < Lane<kDtype>::kVectors; i++) y[place + i] = own.vector[i];
}
