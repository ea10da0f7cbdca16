// bipolarQuantizeRotated: activations to bipolar-INT operands, rotated first, or with a zero point per row, or both.
//
// With width > 0 the kernel quantizes x Q, Q the blocks of formats/hadamard.py. A block lies within a run of 256
// columns: three of its steps are within a lane, the others between lanes. With zero set (formats/bipolar.py:
// quantize_with_zero), above and below being the largest x and -x of the row, at least 0, times act_clip,
//
//   step = (above + below) / (2 (2^q - 1)),  z = round(below / step / 2),
//   code = clamp(round((x / step + 2 z) / 2), 0, 2^q - 1), ties up in even and down in odd columns
//   sums[m] = sum_k code[m, k], sums[M + m] = 2 z
//
// else as quantize.cu, which also has the grid, the order of columns in a warp and the tiles. x is in fp32 here, so
// quotients are divisions.
#include "codes.cuh"
#include "../shared/hadamard.cuh"

// The bits of the largest of x, or of -x with flip = the sign bit, and 0; a NaN of that sign is above all.
__device__ __forceinline__ uint32 largestOf(const Columns<kFloat32>& own, uint32 flip) {
    int most = 0;  // as floats that are not negative order
#pragma unroll
    for (int i = 0; i < kRuns * kRun; i++) most = max(most, int(own.word[i / kRun][i % kRun] ^ flip));
    return uint32(most);
}

// As Coder with 2 z in place of limit, and the rounding of quantize_with_zero, which is exact.
struct ZeroCoder {
    float step, middle;  // middle: 2 z
    int limit;

    // above, below: of the row, times act_clip.
    __device__ __forceinline__ ZeroCoder(float above, float below, int limit) : limit(limit) {
        const float given = __fdiv_rn(__fadd_rn(above, below), float(2 * limit));
        const bool ranges = given > 0.f;
        step = ranges ? given : 1.f;
        const float zero = ranges ? rintf(__fmul_rn(__fdiv_rn(below, step), 0.5f)) : 0.f;
        middle = 2.f * fminf(zero, float(limit));
    }

    template <bool kShort>
    __device__ __forceinline__ uint32 shiftedCode(float x, bool odd) const {
        const float unit = float(2 * limit + 2);  // a power of 2
        const float u = fminf(__saturatef(__fmul_rn(__fadd_rn(__fdiv_rn(x, step), middle), 1.f / unit)),
                              float(2 * limit) / unit);
        if (odd) return __float_as_uint(__fmaf_ru(u, 0.5f * unit, Coder::kDown));
        return __float_as_uint(__fmaf_rd(u, 0.5f * unit, Coder::kUp));
    }
};

// A lane's columns times Q, run by run. width: of a block, 8 to 256. root: 1 / sqrt(width) rounded.
template <int kDtype>
__device__ __forceinline__ Columns<kFloat32> rotated(const Columns<kDtype>& own, int lane, int width, float root) {
    static_assert(kRun == kHadamardColumns, "a run of a warp is what rotateRun takes");
    const uint32 signs = hadamardSigns(lane);
    Columns<kFloat32> result;
#pragma unroll
    for (int run = 0; run < kRuns; run++) {
        float v[kRun];
#pragma unroll
        for (int i = 0; i < kRun; i++) v[i] = signs >> i & 1 ? -own.value(run, i) : own.value(run, i);
        rotateRun(v, lane, width, root);
#pragma unroll
        for (int i = 0; i < kRun; i++) result.word[run][i] = __float_as_uint(v[i]);
    }
    return result;
}

// zero: rows have zero points. width: of the rotation's blocks, or 0 for none; root: 1 / sqrt(width).
template <int kPlanes, int kDtype>
__global__ void __launch_bounds__(kMaxWarps * kWarpSize)
    bipolarQuantizeRotated(const uint8* x,                   // [M, K] of kDtype; written until the wait: no __restrict__
                           const float* __restrict__ actClip,  // [1]
                           uint8* __restrict__ tiles,        // [ceil(M/64), k tiles, planes, 64, 128]
                           int* __restrict__ sums,           // [M], or [2, M] where zero is set
                           float* __restrict__ steps,        // [M]
                           int M, int K, int actLimit, int perToken, int zero, int width, float root) {
    constexpr bool kBytes = kPlanes == 0;
    constexpr int kTileColumns = kBytes ? kLineBytes : kBitsPerLine;
    constexpr uint32 kOnes = 0x01010101u, kSign = 0x80000000u;
    __shared__ uint32 highs[kMaxWarps], lows[kMaxWarps], totals[kMaxWarps];
    const int warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int limit = kBytes ? actLimit : (1 << kPlanes) - 1;
    const int rowInBlock = blockIdx.x % kBlockRows;
    const size_t tileBytes = size_t(kBytes ? 1 : kPlanes) * kPlaneBytes;
    uint8* block = tiles + blockIdx.x / kBlockRows * ((K + kTileColumns - 1) / kTileColumns) * tileBytes;
    const uint8* row = x + size_t(blockIdx.x) * K * Columns<kDtype>::kElement;
    const bool vectors = K % kRun == 0 && reinterpret_cast<uint64>(x) % kChunkBytes == 0;
    const int stride = warps * kBitsPerLine;
    const auto load = [&](int stretch) {
        const Columns<kDtype> own(row, stretch + lane * kRun, K, vectors);
        if (width != 0) return rotated(own, lane, width, root);
        Columns<kFloat32> plain;
#pragma unroll
        for (int i = 0; i < kRuns * kRun; i++) {
            plain.word[i / kRun][i % kRun] = __float_as_uint(own.value(i / kRun, i % kRun));
        }
        return plain;
    };

    allowNextKernel();
    waitForPriorKernels();  // from here on x may be read and the results written
    const float clip = actClip[0];
    const int begin = warp * kBitsPerLine;  // this warp's first column
    Columns<kFloat32> own = load(begin);
    uint32 high = largestOf(own, 0), low = largestOf(own, kSign);
    for (int later = begin + stride; later < K; later += stride) {
        const Columns<kFloat32> next = load(later);
        high = max(high, largestOf(next, 0));
        low = max(low, largestOf(next, kSign));
    }
    high = blockMax(high, highs, warps);
    low = blockMax(low, lows, warps);
    const float above = __fmul_rn(__uint_as_float(high), clip), below = __fmul_rn(__uint_as_float(low), clip);
    const float range = perToken ? __fmul_rn(__uint_as_float(max(high, low)), clip) : clip;
    const float step =
        zero ? __fdiv_rn(__fadd_rn(above, below), float(2 * limit)) : __fdiv_rn(range, float(limit));
    const ZeroCoder zeroCoder(above, below, limit);
    const Coder coder(step, limit, max(high, low));

    uint32 sum = 0;
    for (int stretch = begin; true;) {
        uint32 codes[kWords];
        if (zero) {
            encode<false>(own, zeroCoder, codes);
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
        own = load(stretch);
    }
    sum = blockSum(sum, totals, warps);
    if (threadIdx.x == 0) {
        sums[blockIdx.x] = int(sum);
        steps[blockIdx.x] = step;
        if (zero) sums[size_t(M) + blockIdx.x] = int(zeroCoder.middle);
    }
}
