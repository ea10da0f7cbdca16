// From a row of x to codes in tile order: what the quantizers of activations share. Layouts: quantize.cu, planes.cuh.
#pragma once
#include "planes.cuh"
#include "../shared/mma.cuh"

constexpr int kMaxWarps = QK_QUANTIZE_WARPS;
constexpr int kRun = 8;                              // neighbouring columns of a lane
constexpr int kRuns = 4;                             // runs of a lane
constexpr int kRunDistance = kWarpSize * kRun;       // columns from a lane's run to its next
constexpr int kBytesPerWord = 4;
constexpr int kWords = kRun * kRuns / kBytesPerWord;  // registers of a lane's codes
static_assert(kRunDistance * kRuns == kBitsPerLine && kWords == kBitsPerByte, "a byte of a plane per run");

// A lane's columns of a stretch as they are in memory; those behind K are 0.
template <int kDtype>
struct Columns {
    static constexpr int kElement = kDtype == kFloat32 ? 4 : 2;
    static constexpr int kRunWords = kRun * kElement / kBytesPerWord;
    uint32 word[kRuns][kRunWords];

    Columns() = default;

    // vectors: rows begin at multiples of 16 bytes and K is a multiple of kRun.
    __device__ __forceinline__ Columns(const uint8* row, int first, int K, bool vectors) {
        if (!vectors) {
            loadSingly(row, first, K);
            return;
        }
        const uint8* from = row + size_t(first) * kElement;
        keepInRegister(from);  // one address for all runs
#pragma unroll
        for (int run = 0; run < kRuns; run++) {
            const bool wanted = first + run * kRunDistance < K;
#pragma unroll
            for (int w = 0; w < kRunWords; w += kBytesPerWord) {
                uint4 part = make_uint4(0, 0, 0, 0);
                if (wanted) part = *reinterpret_cast<const uint4*>(from + run * kRunDistance * kElement + w * 4);
                word[run][w] = part.x, word[run][w + 1] = part.y;
                word[run][w + 2] = part.z, word[run][w + 3] = part.w;
            }
        }
    }

    __device__ __forceinline__ void loadSingly(const uint8* row, int first, int K) {
#pragma unroll
        for (int run = 0; run < kRuns; run++) {
#pragma unroll
            for (int w = 0; w < kRunWords; w++) word[run][w] = 0;
#pragma unroll
            for (int i = 0; i < kRun; i++) {
                const int column = first + run * kRunDistance + i;
                if (column >= K) continue;
                if constexpr (kDtype == kFloat32) {
                    word[run][i] = reinterpret_cast<const uint32*>(row)[column];
                } else {
                    word[run][i / 2] |= uint32(reinterpret_cast<const uint16*>(row)[column]) << (i % 2 * 16);
                }
            }
        }
    }

    __device__ __forceinline__ float value(int run, int i) const {
        if constexpr (kDtype == kFloat32) return __uint_as_float(word[run][i]);
        return shortToFloat(uint16(word[run][i / 2] >> (i % 2 * 16)), kDtype);
    }

    // The bits of the largest of x, or of -x with kBelow, and 0. They order as these do; NaN is above all.
    template <bool kBelow>
    __device__ __forceinline__ uint32 reach() const {
        int most = 0;  // as floats that are not negative order
        if constexpr (kDtype == kFloat32) {
#pragma unroll
            for (int i = 0; i < kRuns * kRun; i++) {
                most = max(most, int(word[i / kRun][i % kRun] ^ (kBelow ? ~kNotANumberBits : 0u)));
            }
        } else {
            uint32 pair = 0;
#pragma unroll
            for (int i = 0; i < kRuns * kRunWords; i++) {
                pair = largestPairs<kDtype, kBelow>(pair, word[i / kRunWords][i % kRunWords]);
            }
            most = max(most, __float_as_int(shortToFloat(uint16(pair), kDtype)));
            most = max(most, __float_as_int(shortToFloat(uint16(pair >> 16), kDtype)));
        }
        return uint32(most);
    }

    // The bits of the largest |x|, which order as |x| does, NaN above all.
    __device__ __forceinline__ uint32 peak() const {
        if constexpr (kDtype == kFloat32) {
            uint32 most = 0;
#pragma unroll
            for (int i = 0; i < kRuns * kRun; i++) most = max(most, word[i / kRun][i % kRun] & kNotANumberBits);
            return most;
        }
        uint32 pair = 0;
#pragma unroll
        for (int i = 0; i < kRuns * kRunWords; i++) {
            pair = largestMagnitudes<kDtype>(pair, word[i / kRunWords][i % kRunWords]);
        }
        return max(__float_as_uint(shortToFloat(uint16(pair), kDtype)),
                   __float_as_uint(shortToFloat(uint16(pair >> 16), kDtype)));
    }
};

// How x / step is found, correctly rounded: divided; or, in an ordinary row, from the rounded inverse of step by one
// correction, which is enough for x of at most 11 significant bits, or by two (Markstein: a quotient within a unit of
// its last place, corrected once with the rounded inverse, is the rounded one).
enum Quotient : int { kDivided, kCorrected, kCorrectedTwice };
template <int kDtype>
constexpr Quotient kOrdinaryQuotient = kDtype == kFloat32 ? kCorrectedTwice : kCorrected;

// The codes of a row. With u = RN(RN(x / step) + middle) clamped to 0 .. 2 limit, a code is floor((u + 1) / 2) in an
// even and ceil((u - 1) / 2) in an odd column; one multiply-add with directed rounding puts it into the second byte of
// a float: at 2^15 a float counts in steps of 2^-8, so adding rounds to those steps, and the bits above are the floor,
// or, where 1 - 2^-8 was added, the ceiling. All is in units of 2^(q + 1), which rounds alike: adding saturates at 0
// then, and at a number above 2 limit, without an instruction more.
// middle: limit, or with a zero point z 2 z. Without one the reference also rounds u + 1. That changes a code only where
// u is the float below 1, which only limit 1 can reach; there an even column's factor is one step larger.
template <bool kZero>
struct Coder {
    float step, divisor, inverse, middle;  // divisor: step in units
    int limit;
    bool ordinary;  // step, x and their quotients are far from overflow and underflow

    static constexpr float kOrdinary = 1.152921504606847e18f;  // 2^60
    static constexpr float kUp = 32768.5f;                     // 2^15 + 1/2
    static constexpr float kDown = 32768.49609375f;            // 2^15 - 1/2 + 1 - 2^-8
    static constexpr float kAboveOne = 1.00000011920929f;      // 1 + 2^-23

    Coder() = default;

    // below: how far the row reaches below 0, where it has a zero point. peak: bits of its largest |x|.
    __device__ __forceinline__ Coder(float given, float below, int limit, uint32 peak)
        : step(given > 0.f ? given : 1.f), limit(limit) {
        ordinary = step >= 1.f / kOrdinary && step <= kOrdinary && __uint_as_float(peak) <= kOrdinary;
        divisor = __fmul_rn(step, unit());
        inverse = __frcp_rn(divisor);
        middle = float(limit);
        if constexpr (kZero) {
            const float zero = given > 0.f ? rintf(__fmul_rn(__fdiv_rn(below, step), 0.5f)) : 0.f;
            middle = 2.f * fminf(zero, float(limit));
        }
    }

    __device__ __forceinline__ float unit() const { return float(2 * limit + 2); }  // a power of 2

    // RN(x / step) in units. kCorrected was compared with a division for every pair of significands (all 2^33). Where
    // the result is below 2^-26, which may underflow on the way, it is so small that the code does not depend on it.
    template <Quotient kQuotient>
    __device__ __forceinline__ float quotient(float x) const {
        if constexpr (kQuotient == kDivided) return __fmul_rn(__fdiv_rn(x, step), 1.f / unit());
        float found = __fmul_rn(x, inverse);
#pragma unroll
        for (int i = 0; i < int(kQuotient); i++) found = __fmaf_rn(__fmaf_rn(-found, divisor, x), inverse, found);
        return found;
    }

    template <Quotient kQuotient>
    __device__ __forceinline__ uint32 shiftedCode(float x, bool odd) const {
        const float end = float(limit) / unit(), factor = 0.5f * unit();
        const float u = fminf(__saturatef(__fadd_rn(quotient<kQuotient>(x), kZero ? middle / unit() : end)), 2.f * end);
        if (odd) return __float_as_uint(__fmaf_ru(u, factor, kDown));
        return __float_as_uint(__fmaf_rd(u, !kZero && limit == 1 ? kAboveOne * factor : factor, kUp));
    }
};

// A lane's codes, four to a word: word i holds column i of every run, byte v that of run v.
template <Quotient kQuotient, bool kZero, int kDtype>
__device__ __forceinline__ void encodeBy(const Columns<kDtype>& own, const Coder<kZero>& coder, uint32 (&codes)[kWords]) {
#pragma unroll
    for (int w = 0; w < kWords; w++) {
        uint32 code[kBytesPerWord];
#pragma unroll
        for (int b = 0; b < kBytesPerWord; b++) {
            code[b] = coder.template shiftedCode<kQuotient>(own.value(b, w), w % 2 != 0);
        }
        codes[w] = selectBytes(selectBytes(code[0], code[1], 0x51), selectBytes(code[2], code[3], 0x51), 0x5410);
    }
}
template <bool kZero, int kDtype>
__device__ __forceinline__ void encode(const Columns<kDtype>& own, const Coder<kZero>& coder, uint32 (&codes)[kWords]) {
    if (coder.ordinary) {
        encodeBy<kOrdinaryQuotient<kDtype>>(own, coder, codes);
    } else {
        encodeBy<kDivided>(own, coder, codes);
    }
}

// Columns behind K get code 0, which adds nothing to any product or sum.
__device__ __forceinline__ void clearBehind(uint32 (&codes)[kWords], int first, int K) {
#pragma unroll
    for (int w = 0; w < kWords; w++) {
#pragma unroll
        for (int b = 0; b < kBytesPerWord; b++) {
            if (first + b * kRunDistance + w >= K) codes[w] &= ~(0xFFu << b * kBitsPerByte);
        }
    }
}

// Words of codes, word i for column i of a byte, to words of planes: bit i of a byte of word p is bit p of column i's
// code. Codes of a width up to 1, 2 or 4 leave room in a byte for those of 8, 4 or 2 columns, so these words are merged
// first.
template <int kPlanes>
__device__ __forceinline__ void transposeBits(uint32 (&words)[kWords]) {
    constexpr int kGroup = kPlanes > 4 ? 8 : kPlanes > 2 ? 4 : kPlanes;
#pragma unroll
    for (int i = kGroup; i < kWords; i++) words[i % kGroup] += words[i] << (i - i % kGroup);
    exchangeBits<kGroup>(words);
}

// Byte v of lane i of four neighbouring lanes becomes byte i of lane v.
__device__ __forceinline__ uint32 transposeBytes(uint32 word) {
    uint32 other = __shfl_xor_sync(kFullWarp, word, 2);
    word = selectBytes(word, other, threadIdx.x & 2 ? 0x3276 : 0x5410);
    other = __shfl_xor_sync(kFullWarp, word, 1);
    return selectBytes(word, other, threadIdx.x & 1 ? 0x3715 : 0x6240);
}

// One word of each plane per lane. tile: of the row's block and k tile; row: within the block.
template <int kPlanes>
__device__ __forceinline__ void storePlanes(uint32 (&codes)[kWords], uint8* tile, int row, int lane) {
    transposeBits<kPlanes>(codes);
    const int byte = lane % kRuns * kWarpSize + lane / kRuns * kBytesPerWord;
    uint8* line = tile + row * kLineBytes + chunkOffset(byte / kChunkBytes, row) + byte % kChunkBytes;
#pragma unroll
    for (int plane = 0; plane < kPlanes; plane++) {
        *reinterpret_cast<uint32*>(line + plane * kPlaneBytes) = transposeBytes(codes[plane]);
    }
}

// One word of each chunk of a line per lane: lanes 4 j + v have line 2 v + j / 4 of the stretch. tiles: of the row's block.
__device__ __forceinline__ void storeBytes(const uint32 (&codes)[kWords], uint8* tiles, int row, int stretch, int K) {
    constexpr int kLineLanes = kLineBytes / kRun;
    const int lane = threadIdx.x % kWarpSize;
    const int kTile = stretch / kLineBytes + lane % kRuns * (kRunDistance / kLineBytes) + lane / kLineLanes;
    uint8* line = tiles + size_t(kTile) * kPlaneBytes + row * kLineBytes + lane % kLineLanes / kRuns * kBytesPerWord;
#pragma unroll
    for (int i = 0; i < kWords; i++) {
        const uint32 word = transposeBytes(codes[i]);
        if (kTile * kLineBytes < K) *reinterpret_cast<uint32*>(line + chunkOffset(i, row)) = word;
    }
}

// How far a row reaches, in bits of floats: above and below 0, or without kZero to either side.
template <bool kZero>
struct Reach {
    uint32 above = 0, below = 0;

    template <int kDtype>
    __device__ __forceinline__ void add(const Columns<kDtype>& own) {
        above = max(above, kZero ? own.template reach<false>() : own.peak());
        if constexpr (kZero) below = max(below, own.template reach<true>());
    }
    __device__ __forceinline__ uint32 peak() const { return max(above, below); }

    // The furthest of all threads, for every thread.
    __device__ __forceinline__ void ofBlock(uint2* shared, uint32 warps) {
        const uint32 lane = threadIdx.x % kWarpSize;
        above = __reduce_max_sync(kFullWarp, above);
        if constexpr (kZero) below = __reduce_max_sync(kFullWarp, below);
        if (lane == 0) shared[threadIdx.x / kWarpSize] = make_uint2(above, below);
        __syncthreads();
        const uint2 other = lane < warps ? shared[lane] : make_uint2(0, 0);
        above = __reduce_max_sync(kFullWarp, other.x);
        if constexpr (kZero) below = __reduce_max_sync(kFullWarp, other.y);
    }
};

// The sum of all threads, for those of the first warp.
__device__ __forceinline__ uint32 blockSum(uint32 value, uint32* shared, uint32 warps) {
    const uint32 lane = threadIdx.x % kWarpSize;
    value = __reduce_add_sync(kFullWarp, value);
    if (lane == 0) shared[threadIdx.x / kWarpSize] = value;
    __syncthreads();
    if (threadIdx.x >= kWarpSize) return 0;
    return __reduce_add_sync(kFullWarp, lane < warps ? shared[lane] : 0u);
}
