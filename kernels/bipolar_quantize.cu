// bipolarQuantize: activations to bipolar-INT operands in one launch: absmax, codes, planes or bytes, row sums.
//
//   step[m] = clip_m / (2^q - 1),  clip_m = act_clip * max_k |x[m, k]| (perToken) or act_clip
//   code[m, k] = clamp(round((x / step + 2^q - 1) / 2), 0, 2^q - 1), ties up in even and down in odd columns
//   (formats/bipolar.py: nearest_codes)
//   tiles: bipolar.cuh, planes of bits or one plane of bytes; sums[m] = sum_k code[m, k]
//
// grid: one block per token; block: one warp per 1024 columns, up to kMaxWarps. A lane holds 32 columns, so that it
// writes one whole word per plane and a warp one whole 128-byte line.
// Limits: rows of the last block of 64 behind M are left unwritten: nothing reads the results they lead to.
#include "bipolar.cuh"
#include "mma.cuh"

constexpr int kLaneColumns = kBitsPerWord;  // columns of a lane
constexpr int kMaxWarps = 16;
constexpr int kVector = 8;                  // 16-bit elements of a 16-byte load

struct Columns {
    float value[kLaneColumns];
};

template <int kDtype>
__device__ __forceinline__ Columns loadColumns(const void* row, int first, int K, bool aligned) {
    Columns c;
    if (kDtype != kFloat32 && aligned && first + kLaneColumns <= K) {
#pragma unroll
        for (int v = 0; v < kLaneColumns / kVector; v++) {
            const uint4 words = reinterpret_cast<const uint4*>(static_cast<const uint16*>(row) + first)[v];
            const uint32 word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
            for (int e = 0; e < kVector; e++) {
                c.value[v * kVector + e] = shortToFloat(uint16(word[e / 2] >> (e % 2 * 16)), kDtype);
            }
        }
        return c;
    }
#pragma unroll
    for (int i = 0; i < kLaneColumns; i++) c.value[i] = first + i < K ? loadElement(row, first + i, kDtype) : 0.f;
    return c;
}

__device__ __forceinline__ float largest(const Columns& c) {
    float peak = 0.f;
#pragma unroll
    for (int i = 0; i < kLaneColumns; i++) peak = fmaxf(peak, fabsf(c.value[i]));
    return peak;
}

// Codes of a lane's columns; those behind K are 0, which adds nothing to any product or sum.
__device__ __forceinline__ void encode(const Columns& c, float step, float limit, int first, int K,
                                       uint32 (&code)[kLaneColumns]) {
    const float divisor = step > 0.f ? step : 1.f;
#pragma unroll
    for (int i = 0; i < kLaneColumns; i++) {
        const float scaled = __fmul_rn(__fadd_rn(__fdiv_rn(c.value[i], divisor), limit), 0.5f);
        // first is even: ties go up in even columns and down in odd ones.
        const float rounded = i % 2 == 0 ? floorf(__fadd_rn(scaled, 0.5f)) : ceilf(__fadd_rn(scaled, -0.5f));
        code[i] = first + i < K ? uint32(fminf(fmaxf(rounded, 0.f), limit)) : 0u;
    }
}

// A word per plane: bit b is the plane's bit of column b of the lane.
template <int kPlanes>
__device__ __forceinline__ void storePlanes(const uint32 (&code)[kLaneColumns], uint8* tiles, int row, int kTile,
                                            int kTiles, int lane) {
    const int offset = chunkOffset(lane / 4, row) + lane % 4 * 4;
#pragma unroll
    for (int plane = 0; plane < kPlanes; plane++) {
        uint32 word = 0;
#pragma unroll
        for (int i = 0; i < kLaneColumns; i++) word |= (code[i] >> plane & 1u) << i;
        *reinterpret_cast<uint32*>(tiles + lineOffset(row, kTile, kTiles, plane, kPlanes) + offset) = word;
    }
}

// Two chunks of codes; 4 lanes make a line.
__device__ __forceinline__ void storeBytes(const uint32 (&code)[kLaneColumns], uint8* tiles, int row, int kTile,
                                           int kTiles, int lane) {
    if (kTile >= kTiles) return;
    uint8* line = tiles + lineOffset(row, kTile, kTiles, 0, 1);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32 word[4];
#pragma unroll
        for (int w = 0; w < 4; w++) {
            const int i = half * kChunkBytes + w * 4;
            word[w] = code[i] | code[i + 1] << 8 | code[i + 2] << 16 | code[i + 3] << 24;
        }
        *reinterpret_cast<uint4*>(line + chunkOffset(lane % 4 * 2 + half, row)) =
            make_uint4(word[0], word[1], word[2], word[3]);
    }
}

__device__ __forceinline__ float blockMax(float value, float* shared, int warps) {
#pragma unroll
    for (int mask = 1; mask < kWarpSize; mask *= 2) value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, mask));
    if (threadIdx.x % kWarpSize == 0) shared[threadIdx.x / kWarpSize] = value;
    __syncthreads();
    for (int w = 0; w < warps; w++) value = fmaxf(value, shared[w]);
    return value;
}

__device__ __forceinline__ int blockSum(int value, int* shared, int warps) {
#pragma unroll
    for (int mask = 1; mask < kWarpSize; mask *= 2) value += __shfl_xor_sync(kFullWarp, value, mask);
    if (threadIdx.x % kWarpSize == 0) shared[threadIdx.x / kWarpSize] = value;
    __syncthreads();
    int sum = 0;
    for (int w = 0; w < warps; w++) sum += shared[w];
    return sum;
}

// kPlanes: act bits, or 0 for one plane of bytes of any width.
template <int kPlanes, int kDtype>
__global__ void __launch_bounds__(kMaxWarps * kWarpSize)
    bipolarQuantize(const uint8* __restrict__ x,            // [M, K] of kDtype
                    const float* __restrict__ actClip,      // [1]
                    uint8* __restrict__ tiles,              // [ceil(M/64), k tiles, planes, 64, 128]
                    int* __restrict__ sums,                 // [M]
                    float* __restrict__ steps,              // [M]
                    int M, int K, int actLimit, int perToken) {
    constexpr int kElement = kDtype == kFloat32 ? 4 : 2;
    __shared__ float peaks[kMaxWarps];
    __shared__ int totals[kMaxWarps];
    const int row = blockIdx.x, lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
    const uint8* rowStart = x + size_t(row) * K * kElement;
    const bool aligned = K % kVector == 0 && reinterpret_cast<uint64>(x) % kChunkBytes == 0;
    const int stretches = (K + kBitsPerLine - 1) / kBitsPerLine;  // 1024 columns each

    allowNextKernel();
    waitForPriorKernels();  // from here on x may be read and the results written
    Columns own = loadColumns<kDtype>(rowStart, warp * kBitsPerLine + lane * kLaneColumns, K, aligned);
    float step;
    const float limit = actLimit;
    if (perToken) {
        float peak = largest(own);
        for (int s = warp + warps; s < stretches; s += warps) {
            const int first = s * kBitsPerLine + lane * kLaneColumns;
            peak = fmaxf(peak, largest(loadColumns<kDtype>(rowStart, first, K, aligned)));
        }
        step = __fdiv_rn(__fmul_rn(blockMax(peak, peaks, warps), actClip[0]), limit);
    } else {
        step = __fdiv_rn(actClip[0], limit);
    }

    int sum = 0;
    for (int s = warp; s < stretches; s += warps) {
        const int first = s * kBitsPerLine + lane * kLaneColumns;
        if (s != warp) own = loadColumns<kDtype>(rowStart, first, K, aligned);
        uint32 code[kLaneColumns];
        encode(own, step, limit, first, K, code);
#pragma unroll
        for (int i = 0; i < kLaneColumns; i++) sum += code[i];
        if constexpr (kPlanes == 0) {
            storeBytes(code, tiles, row, s * kChunksPerLine + lane / 4, (K + kLineBytes - 1) / kLineBytes, lane);
        } else {
            storePlanes<kPlanes>(code, tiles, row, s, stretches, lane);
        }
    }
    sum = blockSum(sum, totals, warps);
    if (threadIdx.x == 0) {
        sums[row] = sum;
        steps[row] = step;
    }
}
