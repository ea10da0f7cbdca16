// bipolarQuantize: activations to bipolar-INT operands in one launch: absmax, codes, planes or bytes, row sums.
//
//   step[m] = clip_m / (2^q - 1),  clip_m = act_clip * max_k |x[m, k]| (perToken) or act_clip
//   code[m, k] = clamp(round((x / step + 2^q - 1) / 2), 0, 2^q - 1), ties up in even and down in odd columns
//   (formats/bipolar.py: nearest_codes)
//   tiles: planes.cuh, planes of bits or one plane of bytes; sums[m] = sum_k code[m, k]
//
// With kZero rows have zero points (quantize_with_zero): above and below being the largest x and -x of the row, at least
// 0, times act_clip,
//
//   step = (above + below) / (2 (2^q - 1)),  z = round(below / step / 2),  code = clamp(round((x / step + 2 z) / 2), ...)
//   sums[M + m] = 2 z
//
// grid: one block per token; block: one warp per stretch of 1024 columns, up to kMaxWarps. A lane holds four runs of 8
// neighbouring columns, the runs of a warp side by side, so that a load of a warp is 512 bytes in a row:
//
//   run v of lane l = columns 256 v + 8 l .. + 7 of the stretch = byte 32 v + l of each plane's line of 128 bytes
//                   = byte l % 16 of the eight chunks of a line of codes
//
// Codes stay packed, four to a register: turned into planes by exchanging bits between eight registers, and into the
// words of a line by exchanging bytes between four lanes.
// NaN: a row that holds one gets the step NaN, as in the reference; its codes for NaN are 0.
// Limits: rows of the last block of 64 behind M are left unwritten: nothing reads the results they lead to.
#include "row.cuh"

// Bounding a block by more threads than it has leaves 56 registers to each. So three blocks of the 11 warps that 11008
// columns take are on a multiprocessor at once; with 64 it is two. Codes of a byte and fp32 would spill.
constexpr int kThreads = kMaxWarps * kWarpSize, kMoreThreads = 576;
static_assert(kMoreThreads >= kThreads, "a bound of the threads as well");

// kPlanes: act bits, or 0 for one plane of bytes of any width.
template <int kPlanes, int kDtype, bool kZero>
__global__ void __launch_bounds__(kPlanes == 0 || kDtype == kFloat32 ? kThreads : kMoreThreads, 2)
    bipolarQuantize(const uint8* x,                         // [M, K] of kDtype; written until the wait: no __restrict__
                    const float* __restrict__ actClip,      // [1]
                    uint8* __restrict__ tiles,              // [ceil(M/64), k tiles, planes, 64, 128]
                    int* __restrict__ sums,                 // [M], or [2, M] with kZero
                    float* __restrict__ steps,              // [M]
                    int M, int K, int actLimit, int perToken) {
    const uint8* row = x + size_t(blockIdx.x) * K * Columns<kDtype>::kElement;
    const bool vectors = K % kRun == 0 && reinterpret_cast<uint64>(x) % kChunkBytes == 0;
    allowNextKernel();
    waitForPriorKernels();  // from here on x may be read and the results written
    const auto load = [&](int stretch) {
        return Columns<kDtype>(row, stretch + threadIdx.x % kWarpSize * kRun, K, vectors);
    };
    quantizeRow<kPlanes, kZero>(load, actClip[0], QuantizedRows{tiles, sums, steps, M, K, actLimit, perToken});
}
