// int8Attention: softmax(Q K^T) V with both products on INT8 codes (FlattenQuant, section 5.1), on GPUs from sm_80 on.
//
//     s[m, t] = (q[m] . k[t]) * scoreStep (+ mask[m, t])         integer sums of codes
//     p[m, t] = round(127 exp(s[m, t] - max_t s[m, t]))          a code again
//     out[m]  = valueStep / sum_t p[m, t] * sum_t p[m, t] v[t]
//
// A block makes 64 kRowTiles rows of Q of one head, a warp 16 kRowTiles of them, and reads all tiles of K twice
// (attention.cuh): first for the largest score of each row, then with V. So the codes of P do not depend on how
// keys are cut into tiles, sums are integers, and results repeat bit for bit.
//
// Q is rounded on the way in. Scores start at 1.5 * 2^23, whose bits plus an integer are that float plus the integer:
// Q K^T comes out as floats with no conversion. For the same reason the low byte of 127 e^x + 1.5 * 2^23 is the code.
// Lane 4 g + t holds rows g, g + 8 and keys 8 i + 2 t, 8 i + 2 t + 1 of 32 keys; as bytes they are an operand of P V.
// Grid (row blocks, heads, batch); the last rows, which see most keys, first. Key tiles arrive in kStages stages.
#include "mask.cuh"

constexpr int kWarps = QK_MMA_WARPS;
constexpr int kThreads = kWarps * kWarpSize;

template <int kDim, int kRowTiles_>
struct Layout {
    static constexpr int kRowTiles = kRowTiles_;
    static constexpr int kWarpRows = 16 * kRowTiles;
    static constexpr int kBlockRows = kWarps * kWarpRows;
    static constexpr int kQuerySteps = kDim / 32;
    static constexpr int kHalfBytes = kTileKeys * kDim;
    static_assert(kDim % 32 == 0, "a product takes 32 dims");
};

// Codes of this lane's share of a warp's rows; returns a bit per row (2 tile + half) that holds a NaN.
template <int kDim, int kRowTiles>
__device__ __forceinline__ int loadQuery(uint4 (&q)[kRowTiles][kDim / 32], const Source& from, const Step& step,
                                         size_t start, int row0, int M, int lane) {
    constexpr int kRuns = kDim / 32;
    int bad = 0;
#pragma unroll
    for (int r = 0; r < kRowTiles; r++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = row0 + 16 * r + 8 * half + lane / 4;
#pragma unroll
            for (int run = 0; run < kRuns; run++) {
                const bool paired = run < kDim / kPairDims * 2;
                const int dim = paired ? run / 2 * kPairDims + lane % 4 * 16 + run % 2 * kRun
                                       : kDim / kPairDims * kPairDims + lane % 4 * kRun;
                float x[kRun] = {};
                if (row < M) loadRun(from, start + size_t(row) * from.rowStride, dim, x);
#pragma unroll
                for (int i = 0; i < kRun; i++) bad |= int(x[i] != x[i]) << (2 * r + half);
                const uint2 codes = runCodes(x, step);
                if (half == 0) {
                    q[r][run].x = codes.x, q[r][run].z = codes.y;
                } else {
                    q[r][run].y = codes.x, q[r][run].w = codes.y;
                }
            }
        }
    }
    bad |= __shfl_xor_sync(kFullWarp, bad, 1);
    return bad | __shfl_xor_sync(kFullWarp, bad, 2);
}

// s = base + Q K^T of a warp's rows and 32 keys.
template <int kDim, int kRowTiles>
__device__ __forceinline__ void scoreStep(int (&s)[kRowTiles][kKeyTiles][4], const uint4 (&q)[kRowTiles][kDim / 32],
                                          const int (&base)[4], uint32 keys, int lane) {
#pragma unroll
    for (int i = 0; i < kKeyTiles; i++) {
        const uint32 group = keys + i * kGroupKeys * kDim;
#pragma unroll
        for (int pair = 0; pair < kDim / kPairDims; pair++) {
            const uint4 k = loadShared16(group + pair * kPieceBytes + lane * 16);
#pragma unroll
            for (int r = 0; r < kRowTiles; r++) {
                if (pair == 0) {
                    signedMma32(s[r][i], base, q[r][0], k.x, k.y);
                } else {
                    signedMma32(s[r][i], s[r][i], q[r][2 * pair], k.x, k.y);
                }
            }
#pragma unroll
            for (int r = 0; r < kRowTiles; r++) {
                signedMma32(s[r][i], s[r][i], q[r][2 * pair + 1], k.z, k.w);
            }
        }
        if constexpr (kDim % kPairDims != 0) {
            const float2 k = loadShared8(group + kDim / kPairDims * kPieceBytes + lane * 8);
#pragma unroll
            for (int r = 0; r < kRowTiles; r++) {
                signedMma32(s[r][i], s[r][i], q[r][kDim / 32 - 1], __float_as_uint(k.x), __float_as_uint(k.y));
            }
        }
    }
}

// Largest scores so far, of rows g and g + 8 of each row tile.
template <int kRowTiles>
__device__ __forceinline__ void takeLargest(float (&largest)[kRowTiles][2], const int (&s)[kRowTiles][kKeyTiles][4]) {
#pragma unroll
    for (int n = 0; n < kRowTiles * kKeyTiles * 4; n++) {
        float& most = largest[n / (kKeyTiles * 4)][n % 4 / 2];
        most = fmaxf(most, __int_as_float(s[n / (kKeyTiles * 4)][n / 4 % kKeyTiles][n % 4]));
    }
}

// Add P V of 32 keys to the sums; P as codes of the scores. largest, total: of rows g and g + 8 of each row tile.
template <int kDim, int kRowTiles>
__device__ __forceinline__ void weighStep(int (&sums)[kRowTiles][kDim / 8][4], int (&total)[kRowTiles][2],
                                          const int (&s)[kRowTiles][kKeyTiles][4], const float (&largest)[kRowTiles][2],
                                          float exponentStep, uint32 values, int lane) {
    uint4 p[kRowTiles];
#pragma unroll
    for (int r = 0; r < kRowTiles; r++) {
        uint32 word[4];
#pragma unroll
        for (int w = 0; w < 4; w++) {
            const int half = w % 2;
            word[w] = probabilityWord(s[r][w / 2 * 2][2 * half], s[r][w / 2 * 2][2 * half + 1],
                                      s[r][w / 2 * 2 + 1][2 * half], s[r][w / 2 * 2 + 1][2 * half + 1],
                                      largest[r][half], exponentStep);
            total[r][half] = __dp4a(int(word[w]), int(kOnes), total[r][half]);
        }
        p[r] = make_uint4(word[0], word[1], word[2], word[3]);
    }
#pragma unroll
    for (int pair = 0; pair < kDim / 16; pair++) {
        const uint4 v = loadShared16(values + pair * kPieceBytes + lane * 16);
#pragma unroll
        for (int r = 0; r < kRowTiles; r++) {
            signedMma32(sums[r][2 * pair], sums[r][2 * pair], p[r], v.x, v.y);
            signedMma32(sums[r][2 * pair + 1], sums[r][2 * pair + 1], p[r], v.z, v.w);
        }
    }
}

template <int kDim,      // of a head
          int kRowTiles, // of 16 rows of Q, per warp
          int kStages>   // key tiles in flight
__global__ void __launch_bounds__(kThreads, kDim <= 128 ? 2 : 1)
    int8Attention(const void* __restrict__ query,  // [batch, heads, M, dims]
                  const uint8* __restrict__ tiles,  // [batch, heads / group, tiles of 64 keys]: attention.cuh
                  const void* __restrict__ mask,    // [batch, heads, M, T] by strides, or null
                  void* __restrict__ out,           // [batch, M, heads, valueDims], a multiple of 8
                  float queryStep, float valueStep, float scoreUnit, float exponentStep,  //
                  int queryBatch, int queryHead, int queryRow, int queryDims,  //
                  int maskBatch, int maskHead, int maskRow, int maskKey, int maskDtype,  //
                  int M, int T, int group, int valueDims, int causal, int dtype) {
    using Shape = Layout<kDim, kRowTiles>;
    constexpr int kHalfBytes = Shape::kHalfBytes;
    extern __shared__ __align__(128) uint8 stages[];
    const uint32 shared = sharedAddress(stages);
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    const int head = blockIdx.y, batch = blockIdx.z, blockRow = (gridDim.x - 1 - blockIdx.x) * Shape::kBlockRows;
    const int row0 = blockRow + warp * Shape::kWarpRows;
    const auto keysOf = [&](int first, int rows) {  // how many keys these rows see
        const int last = min(first + rows, M) - 1;
        return last < first ? 0 : causal ? min(T, max(last + T - M + 1, 0)) : T;
    };
    const int warpKeys = keysOf(row0, Shape::kWarpRows);
    const int count = (keysOf(blockRow, Shape::kBlockRows) + kTileKeys - 1) / kTileKeys;
    const int headTiles = (T + kTileKeys - 1) / kTileKeys;
    const uint8* own = tiles + (size_t(batch) * (gridDim.y / group) + head / group) * headTiles * 2 * kHalfBytes;

    const auto copy = [&](int load) {  // loads of K of every tile, then of K and V of every tile
        if (load < 2 * count) {
            const bool both = load >= count;
            const uint8* from = own + size_t(both ? load - count : load) * 2 * kHalfBytes;
            const uint32 to = shared + load % kStages * 2 * kHalfBytes;
            for (int i = threadIdx.x * 16; i < (both ? 2 : 1) * kHalfBytes; i += kThreads * 16) {
                copyAsync16(to + i, from + i);
            }
        }
        copyCommit();  // an empty group keeps the count
    };
    const auto arrive = [&](int load) {
        copyWait<kStages - 2>();
        __syncthreads();  // this stage is there for all warps, and all are done with the one copied to next
        copy(load + kStages - 1);
        return shared + load % kStages * 2 * kHalfBytes;
    };
#pragma unroll 1
    for (int load = 0; load < kStages - 1; load++) copy(load);

    const Source from{query, queryBatch, queryHead, queryRow, queryDims, dtype};
    uint4 q[kRowTiles][Shape::kQuerySteps];
    const int bad = loadQuery<kDim>(q, from, stepOf(queryStep), rowStart(from, batch, head, 0), row0, M, lane);
    const Visible visible{mask, scoreUnit, maskBatch, maskHead, maskRow, maskKey, maskDtype, M, T, causal};
    const int row = row0 + lane / 4, inStep = lane % 4 * 2;
    int base[4] = {kIntegerBaseBits, kIntegerBaseBits, kIntegerBaseBits, kIntegerBaseBits};
#pragma unroll
    for (int i = 0; i < 4; i++) keepInRegister(base[i]);

    float largest[kRowTiles][2];
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; i++) largest[i / 2][i % 2] = __int_as_float(kMinusInfinityBits);
#pragma unroll 1
    for (int tile = 0; tile < count; tile++) {
        const uint32 stage = arrive(tile);
#pragma unroll 1
        for (int key = tile * kTileKeys; key < min((tile + 1) * kTileKeys, warpKeys); key += kStepKeys) {
            int s[kRowTiles][kKeyTiles][4];
            scoreStep<kDim>(s, q, base, stage + key % kTileKeys * kDim, lane);
            if (needsHiding(visible, row0, key)) hide(s, visible, row, key + inStep);
            takeLargest(largest, s);
        }
    }
    finishLargest(largest, bad);

    int sums[kRowTiles][kDim / 8][4] = {}, total[kRowTiles][2] = {};
#pragma unroll 1
    for (int tile = 0; tile < count; tile++) {
        const uint32 stage = arrive(count + tile);
#pragma unroll 1
        for (int key = tile * kTileKeys; key < min((tile + 1) * kTileKeys, warpKeys); key += kStepKeys) {
            int s[kRowTiles][kKeyTiles][4];
            scoreStep<kDim>(s, q, base, stage + key % kTileKeys * kDim, lane);
            if (needsHiding(visible, row0, key)) hide(s, visible, row, key + inStep);
            weighStep<kDim>(sums, total, s, largest, exponentStep, stage + kHalfBytes + key % kTileKeys * kDim, lane);
        }
    }
    copyWait<0>();

    const size_t first = ((size_t(batch) * M + row) * gridDim.y + head) * valueDims;
    writeRows<kDim>(out, sums, total, largest, valueStep, first, gridDim.y * valueDims, row, M, valueDims, dtype, lane);
}
