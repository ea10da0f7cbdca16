// bipolarQuantize: activations to bipolar-INT operands in one launch: absmax, codes, planes or bytes, row sums.
//
//   step[m] = clip_m / (2^q - 1),  clip_m = act_clip * max_k |x[m, k]| (perToken) or act_clip
//   code[m, k] = clamp(round((x / step + 2^q - 1) / 2), 0, 2^q - 1), ties up in even and down in odd columns
//   (formats/bipolar.py: nearest_codes)
//   tiles: planes.cuh, planes of bits or one plane of bytes; sums[m] = sum_k code[m, k]
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
#include "codes.cuh"

// kPlanes: act bits, or 0 for one plane of bytes of any width.
template <int kPlanes, int kDtype>
__global__ void __launch_bounds__(kMaxWarps * kWarpSize)
    bipolarQuantize(const uint8* x,                         // [M, K] of kDtype; written until the wait: no __restrict__
                    const float* __restrict__ actClip,      // [1]
                    uint8* __restrict__ tiles,              // [ceil(M/64), k tiles, planes, 64, 128]
                    int* __restrict__ sums,                 // [M]
                    float* __restrict__ steps,              // [M]
                    int M, int K, int actLimit, int perToken) {
    constexpr bool kBytes = kPlanes == 0;
    constexpr int kTileColumns = kBytes ? kLineBytes : kBitsPerLine;
    constexpr uint32 kOnes = 0x01010101u;
    __shared__ uint32 peaks[kMaxWarps], totals[kMaxWarps];
    const int warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int limit = kBytes ? actLimit : (1 << kPlanes) - 1;
    const int rowInBlock = blockIdx.x % kBlockRows;
    const size_t tileBytes = size_t(kBytes ? 1 : kPlanes) * kPlaneBytes;
    uint8* block = tiles + blockIdx.x / kBlockRows * ((K + kTileColumns - 1) / kTileColumns) * tileBytes;
    const uint8* row = x + size_t(blockIdx.x) * K * Columns<kDtype>::kElement;
    const bool vectors = K % kRun == 0 && reinterpret_cast<uint64>(x) % kChunkBytes == 0;
    const int stride = warps * kBitsPerLine;
    int stretch = warp * kBitsPerLine;  // its first column

    allowNextKernel();
    waitForPriorKernels();  // from here on x may be read and the results written
    const float clip = actClip[0];
    Columns<kDtype> own(row, stretch + lane * kRun, K, vectors);
    uint32 peak = own.peak();
    for (int later = stretch + stride; later < K; later += stride) {
        peak = max(peak, Columns<kDtype>(row, later + lane * kRun, K, vectors).peak());
    }
    peak = blockMax(peak, peaks, warps);
    const float range = perToken ? __fmul_rn(__uint_as_float(peak), clip) : clip;
    const float step = __fdiv_rn(range, float(limit));
    const Coder coder(step, limit, peak);

    uint32 sum = 0;
    while (true) {
        uint32 codes[kWords];
        if (kDtype != kFloat32 && coder.ordinary) {
            encode<true>(own, coder, codes);
        } else {
            encode<false>(own, coder, codes);
        }
        if (stretch + kBitsPerLine > K) clearBehind(codes, stretch + lane * kRun, K);
#pragma unroll
        for (int w = 0; w < kWords; w++) sum = __dp4a(codes[w], kOnes, sum);
        if constexpr (kBytes) {
            storeBytes(codes, block, rowInBlock, stretch, K);
        } else {
            storePlanes<kPlanes>(codes, block + stretch / kBitsPerLine * tileBytes, rowInBlock, lane);
        }
        stretch += stride;
        if (stretch >= K) break;
        own = Columns<kDtype>(row, stretch + lane * kRun, K, vectors);
    }
    sum = blockSum(sum, totals, warps);
    if (threadIdx.x == 0) {
        sums[blockIdx.x] = int(sum);
        steps[blockIdx.x] = step;
    }
}
