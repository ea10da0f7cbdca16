// int8AttentionQuantize: keys and values to INT8 codes, in the tiles of attention.cuh that int8Attention reads, or
// in those of wgmma.cu.
//
// Grid (tiles of 64 keys, heads of K and V, batch); swizzled, an even number of tiles. Keys behind the last and dims
// behind the width are 0. K goes from registers to its place; V is transposed through shared memory, whose pitch gives the
// 32 lanes 32 banks.
#include "attention.cuh"

constexpr int kThreads = QK_QUANTIZE_THREADS;
constexpr int kLineBytes = 128, kChunkBytes = 16;  // of swizzled tiles

template <int kDim>
__device__ __forceinline__ int keyPlace(int key, int dim) {
    const int group = key / kGroupKeys * kGroupKeys * kDim, row = key % kGroupKeys;
    const int piece = dim / kPairDims, inPiece = dim % kPairDims;
    if (kDim % kPairDims != 0 && piece == kDim / kPairDims) {
        return group + piece * kPieceBytes + (row * 4 + inPiece / 8) * 8;
    }
    return group + piece * kPieceBytes + (row * 4 + inPiece / 16) * 16 + inPiece % 16;
}

// The dim that column g of column tile n of V holds.
__device__ __forceinline__ int columnDim(int n, int g) { return n / 4 * 32 + g / 2 * 8 + n % 4 * 2 + g % 2; }

// Where a dim of V is: 8 n + g of that.
__device__ __forceinline__ int columnLine(int dim) {
    return dim / 32 * 32 + dim / 2 % 4 * 8 + dim / 8 % 4 * 2 + dim % 2;
}

// The same in tiles of 128 keys for warpgroup products (wgmma.cu); half: which 64 of them.
template <int kDim>
__device__ __forceinline__ int swizzledKeyPlace(int key, int dim, int half) {
    const int line = kDim == 64 ? key : half * kTileKeys + key, byte = kDim == 64 ? half * kDim + dim : dim;
    return line * kLineBytes + (byte / kChunkBytes ^ line % 8) * kChunkBytes + byte % kChunkBytes;
}

// V of 64 staged keys in the operand order of warp products.
template <int kDim, int kPitch>
__device__ __forceinline__ void transposeValues(uint8* to, const uint8* staged) {
    constexpr int kStepChunks = kStepKeys * kDim / 16;
    for (int i = threadIdx.x; i < kTileKeys * kDim / 16; i += kThreads) {
        const int lane = i % kWarpSize, pair = i % kStepChunks / kWarpSize;
        const int key = i / kStepChunks * kStepKeys + lane % 4 * 2;
        uint32 words[4];
#pragma unroll
        for (int w = 0; w < 4; w++) {
            const uint8* from = staged + (key + w % 2 * 16) * kPitch + columnDim(2 * pair + w / 2, lane / 4);
            words[w] = packBytes(from[0], from[kPitch], from[8 * kPitch], from[9 * kPitch]);
        }
        *reinterpret_cast<uint4*>(to + i * 16) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// V of 64 staged keys as half the bytes of each line for warpgroup products. A thread transposes four neighbouring dims of
// 16 keys, which stand kGap bytes further than the 16 before: eight words of four such groups lie in 32 banks.
template <int kDim, int kPitch, int kGap>
__device__ __forceinline__ void transposeValuesSwizzled(uint8* to, const uint8* staged, int half) {
    constexpr uint32 kLow01 = 0x5140, kHigh01 = 0x7362, kLowHalves = 0x5410, kHighHalves = 0x7632;
    for (int i = threadIdx.x; i < kTileKeys * kDim / 64; i += kThreads) {
        const int group = i % 4, dim = i / 4 * 4;
        const uint8* from = staged + group * (16 * kPitch + kGap) + dim;
        uint32 transposed[4][4];  // [dim][word]
#pragma unroll
        for (int w = 0; w < 4; w++) {
            uint32 k[4];  // keys 2 w, 2 w + 1, 8 + 2 w, 9 + 2 w
#pragma unroll
            for (int n = 0; n < 4; n++) {
                k[n] = *reinterpret_cast<const uint32*>(from + (2 * w + n / 2 * 8 + n % 2) * kPitch);
            }
            const uint32 a = selectBytes(k[0], k[1], kLow01), b = selectBytes(k[2], k[3], kLow01);
            const uint32 c = selectBytes(k[0], k[1], kHigh01), d = selectBytes(k[2], k[3], kHigh01);
            transposed[0][w] = selectBytes(a, b, kLowHalves), transposed[1][w] = selectBytes(a, b, kHighHalves);
            transposed[2][w] = selectBytes(c, d, kLowHalves), transposed[3][w] = selectBytes(c, d, kHighHalves);
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
            const int line = columnLine(dim + e), chunk = half * 4 + group;
            *reinterpret_cast<uint4*>(to + line * kLineBytes + (chunk ^ line % 8) * kChunkBytes) =
                make_uint4(transposed[e][0], transposed[e][1], transposed[e][2], transposed[e][3]);
        }
    }
}

template <bool kValue>
struct Constant {
    static constexpr bool value = kValue;
};

template <bool kWide>
struct Runs {
    Raw<kRun, kWide> keys, values;
};

template <int kDim, bool kSwizzled>
__global__ void __launch_bounds__(kThreads)
    int8AttentionQuantize(const void* __restrict__ keys, const void* __restrict__ values,  // [batch, heads, T, dims]
                          uint8* __restrict__ tiles,  // attention.cuh, or wgmma.cu if kSwizzled
                          float keyStep, float valueStep,  //
                          int keyBatch, int keyHead, int keyRow, int keyDims,  // strides in elements
                          int valueBatch, int valueHead, int valueRow, int valueDims,  //
                          int T, int dtype) {
    static_assert(kDim % 32 == 0, "columns of V come in four tiles of eight");
    static_assert(!kSwizzled || kDim == 64 || kDim == 128, "lines of 128 bytes hold one key or two");
    constexpr int kPitch = kSwizzled ? kDim : kDim + 16, kGap = kSwizzled ? 32 : 0;
    constexpr int kHalfBytes = kTileKeys * kDim, kTiles = kSwizzled ? 2 : 1;  // tiles of 64 keys that lie together
    constexpr int kRuns = kHalfBytes / kRun;
    constexpr int kAhead = kRuns % (2 * kThreads) == 0 ? 2 : 3;  // runs of K and V that a thread has under way
    static_assert(kRuns % (kAhead * kThreads) == 0, "each thread has as many runs");
    __shared__ __align__(16) uint8 staged[kTileKeys * kPitch + 3 * kGap];
    const int head = blockIdx.y, batch = blockIdx.z, half = blockIdx.x % kTiles;
    uint8* out = tiles + ((size_t(batch) * gridDim.y + head) * gridDim.x + blockIdx.x - half) * 2 * kHalfBytes;
    const Source fromKeys{keys, keyBatch, keyHead, keyRow, keyDims, dtype};
    const Source fromValues{values, valueBatch, valueHead, valueRow, valueDims, dtype};
    const Step ofKeys = stepOf(keyStep), ofValues = stepOf(valueStep);
    const auto place = [&](auto raws, int i) {  // a run of K and of V
        const int row = i / (kDim / kRun), dim = i % (kDim / kRun) * kRun;
        float x[kRun];
        floatsOf(raws.keys, dtype, x);
        const int at = kSwizzled ? swizzledKeyPlace<kDim>(row, dim, half) : keyPlace<kDim>(row, dim);
        *reinterpret_cast<uint2*>(out + at) = runCodes(x, ofKeys);
        floatsOf(raws.values, dtype, x);
        *reinterpret_cast<uint2*>(staged + row * kPitch + row / 16 * kGap + dim) = runCodes(x, ofValues);
    };
    const auto stage = [&](auto wide) {
        constexpr bool kWide = decltype(wide)::value;
#pragma unroll 1
        for (int i = threadIdx.x; i < kRuns; i += kAhead * kThreads) {
            Runs<kWide> raws[kAhead];
#pragma unroll
            for (int n = 0; n < kAhead; n++) {
                const int run = i + n * kThreads, key = blockIdx.x * kTileKeys + run / (kDim / kRun);
                const int dim = run % (kDim / kRun) * kRun;
                raws[n].keys = loadRaw<kRun, kWide>(fromKeys, rowStart(fromKeys, batch, head, key), dim, key < T);
                raws[n].values = loadRaw<kRun, kWide>(fromValues, rowStart(fromValues, batch, head, key), dim, key < T);
            }
#pragma unroll
            for (int n = 0; n < kAhead; n++) place(raws[n], i + n * kThreads);
        }
    };
    if (dtype == kFloat32) {
        stage(Constant<true>{});
    } else {
        stage(Constant<false>{});
    }
    __syncthreads();
    if constexpr (kSwizzled) {
        transposeValuesSwizzled<kDim, kPitch, kGap>(out + 2 * kHalfBytes, staged, half);
    } else {
        transposeValues<kDim, kPitch>(out + kHalfBytes, staged);
    }
}
