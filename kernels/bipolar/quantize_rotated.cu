// bipolarQuantizeRotated: activations to bipolar-INT operands, rotated first: as quantize.cu of x Q, Q the blocks of
// formats/hadamard.py. A block lies within a run of 256 columns: three of its steps are within a lane, the others between
// lanes. Rotated values are in fp32.
#include "row.cuh"
#include "../shared/hadamard.cuh"

// A lane's columns times Q, run by run. width: of a block, 8 to 256. root: 1 / sqrt(width) rounded.
template <int kDtype>
__device__ __forceinline__ Columns<kFloat32> rotated(Columns<kDtype> own, int lane, int width, float root) {
    static_assert(kRun == kHadamardColumns, "a run of a warp is what rotateRun takes");
    constexpr int kElementBits = Columns<kDtype>::kElement * kBitsPerByte, kPerWord = kBitsPerWord / kElementBits;
    const uint32 signs = hadamardSigns(lane);
    uint32 flips[Columns<kDtype>::kRunWords] = {};  // sign bits of a run's words
#pragma unroll
    for (int i = 0; i < kRun; i++) flips[i / kPerWord] |= (signs >> i & 1) << ((i % kPerWord + 1) * kElementBits - 1);
    Columns<kFloat32> result;
#pragma unroll
    for (int run = 0; run < kRuns; run++) {
#pragma unroll
        for (int w = 0; w < Columns<kDtype>::kRunWords; w++) own.word[run][w] ^= flips[w];
        float v[kRun];
#pragma unroll
        for (int i = 0; i < kRun; i++) v[i] = own.value(run, i);
        rotateRun(v, lane, width, root);
#pragma unroll
        for (int i = 0; i < kRun; i++) result.word[run][i] = __float_as_uint(v[i]);
    }
    return result;
}

// width: of the rotation's blocks; root: 1 / sqrt(width).
template <int kPlanes, int kDtype, bool kZero>
__global__ void __launch_bounds__(kMaxWarps * kWarpSize, 2)
    bipolarQuantizeRotated(const uint8* x,                   // [M, K] of kDtype; written until the wait: no __restrict__
                           const float* __restrict__ actClip,  // [1]
                           uint8* __restrict__ tiles,        // [ceil(M/64), k tiles, planes, 64, 128]
                           int* __restrict__ sums,           // [M], or [2, M] with kZero
                           float* __restrict__ steps,        // [M]
                           int M, int K, int actLimit, int perToken, int width, float root) {
    const uint8* row = x + size_t(blockIdx.x) * K * Columns<kDtype>::kElement;
    const bool vectors = K % kRun == 0 && reinterpret_cast<uint64>(x) % kChunkBytes == 0;
    const int lane = threadIdx.x % kWarpSize;
    const auto load = [&](int stretch) {
        return rotated(Columns<kDtype>(row, stretch + lane * kRun, K, vectors), lane, width, root);
    };
    const QuantizedRows rows{tiles, sums, steps, M, K, actLimit, perToken};
    allowNextKernel();
    waitForPriorKernels();  // from here on x may be read and the results written
    quantizeRow<kPlanes, kZero>(load, actClip[0], rows);
}
