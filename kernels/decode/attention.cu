// Attention of a single token with its KV cache. Reads and writes fp16 or bf16 and computes in fp32; sums have a fixed
// order.
#include "../shared/activation.cuh"
#include "decode.cuh"

namespace {

constexpr int kTogether = 2;  // rows of a batch from one look at the end to the next, so that their latencies overlap
constexpr int kSplitStep = QK_SPLIT_STEP;  // entries of a split are a multiple
constexpr uint32 kMinusInfinityBits = 0xff800000;

// Largest over the lanes that are a multiple of kFirst apart.
template <int kFirst>
__device__ __forceinline__ float laneMax(float value) {
#pragma unroll
    for (int mask = kFirst; mask < kWarpSize; mask *= 2) value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, mask));
    return value;
}

// Sums of kHeads values over kLanes neighbouring lanes: lane l gets that of value l % kHeads, added as laneSum adds it.
template <int kHeads, int kLanes>
__device__ __forceinline__ float headSum(float (&values)[kHeads], int lane) {
#pragma unroll
    for (int left = kHeads / 2, mask = 1; left > 0; left /= 2, mask *= 2) {
        const bool upper = lane & mask;
#pragma unroll
        for (int i = 0; i < left; ++i) {
            const float other = __shfl_xor_sync(kFullWarp, upper ? values[2 * i] : values[2 * i + 1], mask);
            values[i] = (upper ? values[2 * i + 1] : values[2 * i]) + other;
        }
    }
    return laneSum<kHeads, kLanes>(values[0]);
}

// What a lane has of a rotary embedding: cosines and sines of the columns of its vector, zeros where there is none.
struct Rotary {
    bool present;
    uint4 cosines, sines;

    // A row's values of this lane times `factor`, turned: each value has its partner half a row away.
    template <int kLanes, int kDtype>
    __device__ __forceinline__ void load(const uint4* row, int part, float factor, float (&own)[kVectorValues]) const {
        constexpr int kHalf = kLanes / 2;
        const uint4 rawOwn = row[part], rawPartners = present ? row[part ^ kHalf] : make_uint4(0, 0, 0, 0);
        unpack<kDtype>(rawOwn, own);
#pragma unroll
        for (int k = 0; k < kVectorValues; ++k) own[k] = rounded(own[k] * factor, kDtype);
        if (!present) return;
        float by[kVectorValues], partners[kVectorValues];
        unpack<kDtype>(cosines, by);
#pragma unroll
        for (int k = 0; k < kVectorValues; ++k) own[k] = rounded(own[k] * by[k], kDtype);
        unpack<kDtype>(sines, by);
        unpack<kDtype>(rawPartners, partners);
#pragma unroll
        for (int k = 0; k < kVectorValues; ++k) {
            const float partner = rounded(partners[k] * factor, kDtype);
            own[k] = rounded(own[k] + rounded((part < kHalf ? -partner : partner) * by[k], kDtype), kDtype);
        }
    }
};

// exp(score - largest of its head) in place of the scores [count][kHeads], and the sums of these in totals [kHeads]. room: kHeads
// floats per warp, with the largest of each warp's; holds their sums afterwards.
template <int kHeads, int kThreads>
__device__ __forceinline__ void scoresToWeights(float* scores, int count, float* room, float (&largest)[kHeads],
                                                float (&totals)[kHeads]) {
    constexpr int kWarps = kThreads / kWarpSize, kAll = kWarps * kHeads;
    static_assert(kThreads % kHeads == 0, "a thread's scores are of one head");
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const float none = __uint_as_float(kMinusInfinityBits);
    float most = none;
    for (int i = lane; i < kAll; i += kWarpSize) most = fmaxf(most, room[i]);
    most = laneMax<kHeads>(most);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) largest[h] = __shfl_sync(kFullWarp, most, h);
    const float reference = most == none ? 0.0f : most;  // nothing counts: every weight is 0, not NaN
    float total = 0.0f;
    for (int i = threadIdx.x; i < count * kHeads; i += kThreads) {
        const float weight = __expf(scores[i] - reference);
        scores[i] = weight;
        total += weight;
    }
    total = laneSum<kHeads, kWarpSize>(total);
    __syncthreads();
    if (lane < kHeads) room[warp * kHeads + lane] = total;
    __syncthreads();
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
        totals[h] = 0.0f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) totals[h] += room[w * kHeads + h];
    }
}

// The weights of an entry, four at once where there are as many.
template <int kHeads>
__device__ __forceinline__ void loadWeights(const float* from, float (&weights)[kHeads]) {
    constexpr int kQuad = 4;
    if constexpr (kHeads % kQuad == 0) {
#pragma unroll
        for (int i = 0; i < kHeads; i += kQuad) {
            const float4 quad = *reinterpret_cast<const float4*>(from + i);
            weights[i] = quad.x, weights[i + 1] = quad.y, weights[i + 2] = quad.z, weights[i + 3] = quad.w;
        }
    } else {
#pragma unroll
        for (int h = 0; h < kHeads; ++h) weights[h] = from[h];
    }
}

}  // namespace

// y[h] = softmax(scale * round(queryScale * q[h]) . keys + mask) . values over one token's cache, for every head of one
// token of every sequence, whose own key and value go into the cache on the way. With `cosine`, the rotary embedding is applied to the
// rounded query and to the own key. Grid: a block per kHeads heads that share keys and values, split of the filled cache
// (split-KV) and sequence; several splits leave their parts to decodeCombine. Of a cache whose heads are no multiple of
// kHeads, the last block computes some for nothing. kHeadDim / 8 lanes work on one key. Entries of the cache behind
// `position` do not count. Only q, key and value may still be written when the kernel starts: the rest is read before that,
// and from memory, since a token's weights push it out of L2. Blocks of fewer threads are for many sequences: several
// share a multiprocessor, and one computes while others wait for memory.
// Shared memory: scores [entry of a split][head], sums [warp][head][kHeadDim], as floats.
template <int kHeadDim, int kDtype, int kThreads, int kHeads>
__global__ void __launch_bounds__(kThreads, kThreads < QK_ATTENTION_THREADS ? kHeads > 1 ? 2 : 3 : 1)
decodeAttention(const uint16* q,                    // [sequences, heads, kHeadDim]; written until the wait: no __restrict__
                const uint16* key,                  // [sequences, kv heads, kHeadDim] of the tokens
                const uint16* value,
                uint16* keys,                       // [sequences, kv heads, capacity, kHeadDim]
                uint16* values,
                const uint8* __restrict__ mask,     // [sequences or 1, capacity], which positions count
                const long long* __restrict__ position,
                const uint16* __restrict__ cosine,  // [kHeadDim], or null with sine
                const uint16* __restrict__ sine,
                uint16* __restrict__ y,             // [sequences, heads, kHeadDim], of a single split
                float* __restrict__ sums,           // [sequences, heads, splits, kHeadDim] weighted values, of several
                float* __restrict__ weights,        // [sequences, heads, splits, 2]: largest score, sum of the weights
                int kvHeads, int headsPerKv, int capacity,
                int queryStride, int keyStride, int valueStride, int maskStride,  // from one sequence to the next
                float queryScale, float scale) {
    constexpr int kWarps = kThreads / kWarpSize;
    constexpr int kLanes = kHeadDim / kVectorValues, kKeys = kWarpSize / kLanes, kStride = kKeys * kWarps;
    constexpr int kBatch = kHeadDim < 128 || kHeads > 1 ? 4 : 8;  // rows of a lane; more would spill
    constexpr int kPass = kStride * kBatch;
    extern __shared__ __align__(16) float scores[];
    __shared__ float room[kWarps * kHeads];
    allowNextKernel();
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const int part = lane % kLanes, first = warp * kKeys + lane / kLanes;
    const int blocksPerKv = (headsPerKv + kHeads - 1) / kHeads, kvHead = blockIdx.x / blocksPerKv;
    const int firstHead = (blockIdx.x - kvHead * blocksPerKv) * kHeads, ownHeads = min(kHeads, headsPerKv - firstHead);
    const int here = int(*position), splits = gridDim.y, sequence = blockIdx.z;
    const size_t sequenceKvHead = size_t(sequence) * kvHeads + kvHead, head = sequenceKvHead * headsPerKv + firstHead;
    mask += size_t(sequence) * maskStride;
    const int length = ((here + splits) / splits + kSplitStep - 1) / kSplitStep * kSplitStep;
    const int from = blockIdx.y * length, end = min(here + 1, from + length);
    uint4* keyRows = reinterpret_cast<uint4*>(keys) + sequenceKvHead * capacity * kLanes;
    uint4* valueRows = reinterpret_cast<uint4*>(values) + sequenceKvHead * capacity * kLanes;
    // This lane's part of a row that lies `ahead` rows behind `at`. The token's own row is taken from where it comes from,
    // so that blocks sharing a cache need not wait for it.
    auto load = [&](const uint4* at, int ahead, int row) {
        return row < end && row != here ? at[ahead * kLanes] : make_uint4(0, 0, 0, 0);
    };
    auto loadMask = [&](int start) {  // bit i: row i of the batch counts
        uint32 counts = 0;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int row = start + first + i * kStride;
            if (row < end && mask[row]) counts |= 1u << i;
        }
        return counts;
    };
    uint4 keyVectors[kBatch], valueVectors[kBatch];
    const uint4* keyAt = keyRows + size_t(from + first) * kLanes + part;
    const uint4* valueAt = valueRows + size_t(from + first) * kLanes + part;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) keyVectors[i] = load(keyAt, i * kStride, from + first + i * kStride);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) valueVectors[i] = load(valueAt, i * kStride, from + first + i * kStride);
    uint32 counts = loadMask(from);
    const uint4 zeros = make_uint4(0, 0, 0, 0);
    const Rotary rotary{cosine != nullptr, cosine ? reinterpret_cast<const uint4*>(cosine)[part] : zeros,
                        cosine ? reinterpret_cast<const uint4*>(sine)[part] : zeros};
    waitForPriorKernels();
    const uint4 ownValue = reinterpret_cast<const uint4*>(value + size_t(sequence) * valueStride)[kvHead * kLanes + part];
    float query[kHeads][kVectorValues], found[kVectorValues];
    const uint4* queryRows = reinterpret_cast<const uint4*>(q + size_t(sequence) * queryStride);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
        const int row = kvHead * headsPerKv + firstHead + min(h, ownHeads - 1);
        rotary.load<kLanes, kDtype>(queryRows + size_t(row) * kLanes, part, queryScale, query[h]);
    }
    rotary.load<kLanes, kDtype>(reinterpret_cast<const uint4*>(key + size_t(sequence) * keyStride) + size_t(kvHead) * kLanes, part,
                                1.0f, found);
    const uint4 ownKey = pack<kDtype>(found);
    if (blockIdx.y == 0 && firstHead == 0 && threadIdx.x < kLanes) {
        keyRows[size_t(here) * kLanes + threadIdx.x] = ownKey;
        valueRows[size_t(here) * kLanes + threadIdx.x] = ownValue;
    }

    const float none = __uint_as_float(kMinusInfinityBits);
    float most = none;  // of head lane % kHeads
    for (int start = from; start < end; start += kPass) {
        const uint32 nextCounts = start + kPass < end ? loadMask(start + kPass) : 0;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (i % kTogether == 0 && start + i * kStride >= end) break;  // the whole block
            const int row = start + first + i * kStride;
            unpack<kDtype>(row == here && row < end ? ownKey : keyVectors[i], found);
            keyVectors[i] = load(keyAt, i * kStride + kPass, row + kPass);
            float dots[kHeads] = {};
#pragma unroll
            for (int h = 0; h < kHeads; ++h) {
#pragma unroll
                for (int k = 0; k < kVectorValues; ++k) dots[h] += query[h][k] * found[k];
            }
            float dot = headSum<kHeads, kLanes>(dots, lane) * scale;
            if (!(counts >> i & 1)) dot = none;
            if (row < end && part < kHeads) scores[(row - from) * kHeads + part] = dot;
            most = fmaxf(most, dot);
        }
        counts = nextCounts;
        keyAt += kPass * kLanes;
    }
    most = laneMax<kHeads>(most);
    if (lane < kHeads) room[warp * kHeads + lane] = most;
    __syncthreads();
    float largest[kHeads], totals[kHeads];
    scoresToWeights<kHeads, kThreads>(scores, end - from, room, largest, totals);

    float partial[kHeads][kVectorValues] = {};
    for (int start = from; start < end; start += kPass) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (i % kTogether == 0 && start + i * kStride >= end) break;
            const int row = start + first + i * kStride;
            unpack<kDtype>(row == here && row < end ? ownValue : valueVectors[i], found);
            valueVectors[i] = load(valueAt, i * kStride + kPass, row + kPass);
            float weight[kHeads] = {};
            if (row < end) loadWeights(scores + (row - from) * kHeads, weight);
#pragma unroll
            for (int h = 0; h < kHeads; ++h) {
#pragma unroll
                for (int k = 0; k < kVectorValues; ++k) partial[h][k] += weight[h] * found[k];
            }
        }
        valueAt += kPass * kLanes;
    }
    float* parts = scores + length * kHeads;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
#pragma unroll
        for (int k = 0; k < kVectorValues; ++k) {
            const float sum = laneSum<kLanes, kWarpSize>(partial[h][k]);
            if (lane < kLanes) parts[(warp * kHeads + h) * kHeadDim + part * kVectorValues + k] = sum;
        }
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
        if (h >= ownHeads) break;
        const size_t slot = (head + h) * splits + blockIdx.y;
        for (int column = threadIdx.x; column < kHeadDim; column += kThreads) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < kWarps; ++w) sum += parts[(w * kHeads + h) * kHeadDim + column];
            if (splits == 1) y[(head + h) * kHeadDim + column] = floatToShort(sum / totals[h], kDtype);
            else sums[slot * kHeadDim + column] = sum;
        }
        if (splits > 1 && threadIdx.x == 0) {
            weights[2 * slot] = largest[h];
            weights[2 * slot + 1] = totals[h];
        }
    }
}

// y from the parts of decodeAttention's splits, added in their order. Grid: one block per head of a sequence.
template <int kHeadDim, int kDtype>
__global__ void __launch_bounds__(kHeadDim)
decodeCombine(const float* sums,         // [heads, splits, kHeadDim]; written until the wait, so not __restrict__
            const float* weights,      // [heads, splits, 2]
            uint16* __restrict__ y,    // [heads, kHeadDim]
            int splits) {
    allowNextKernel();
    waitForPriorKernels();
    const size_t head = blockIdx.x;
    sums += head * splits * kHeadDim;
    weights += head * splits * 2;
    float largest = weights[0], total = 0.0f, sum = 0.0f;
    for (int i = 1; i < splits; ++i) largest = fmaxf(largest, weights[2 * i]);
#pragma unroll 4
    for (int i = 0; i < splits; ++i) {
        const float share = __expf(weights[2 * i] - largest);
        total += share * weights[2 * i + 1];
        sum += share * sums[i * kHeadDim + threadIdx.x];
    }
    y[head * kHeadDim + threadIdx.x] = floatToShort(sum / total, kDtype);
}
