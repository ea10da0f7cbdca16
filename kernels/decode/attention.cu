// Attention of a single token with its KV cache. Reads and writes fp16 or bf16 and computes in fp32; sums have a fixed
// order.
#include "../shared/activation.cuh"
#include "decode.cuh"

namespace {

constexpr int kTogether = 2;  // rows of a batch from one look at the end to the next, so that their latencies overlap
constexpr int kSplitStep = QK_SPLIT_STEP;  // entries of a split are a multiple
constexpr uint32 kMinusInfinityBits = 0xff800000;

__device__ __forceinline__ float laneMax(float value) {
#pragma unroll
    for (int mask = 1; mask < kWarpSize; mask *= 2) value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, mask));
    return value;
}

}  // namespace

// y[h] = softmax(scale * round(queryScale * q[h]) . keys + mask) . values over one token's cache, for every head of one
// token of every sequence, whose own key and value go into the cache on the way. With `cosine`, the rotary embedding is applied to the
// rounded query and to the own key. Grid: a block per head, split of the filled cache (split-KV) and sequence; several splits leave
// their parts to decodeCombine. kHeadDim / 8 lanes work on one key. Entries of the cache behind `position` do not count.
// Only q, key and value may still be written when the kernel starts: the rest is read before that, and from memory, since
// a token's weights push it out of L2. Shared memory: a float for every entry of a split. Small blocks are for
// many sequences: several share a multiprocessor, and one computes while others wait for memory.
template <int kHeadDim, int kDtype, int kThreads>
__global__ void __launch_bounds__(kThreads, kThreads < QK_ATTENTION_THREADS ? 3 : 1)
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
                int headsPerKv, int capacity,
                int queryStride, int keyStride, int valueStride, int maskStride,  // from one sequence to the next
                float queryScale, float scale) {
    constexpr int kAttentionWarps = kThreads / kWarpSize;
    constexpr int kLanes = kHeadDim / kVectorValues, kKeys = kWarpSize / kLanes, kStride = kKeys * kAttentionWarps;
    constexpr int kBatch = kHeadDim < 128 ? 4 : 8, kPass = kStride * kBatch;  // rows of a lane; more would spill
    extern __shared__ float scores[];
    __shared__ float room[kAttentionWarps];
    __shared__ float parts[kAttentionWarps][kHeadDim];
    allowNextKernel();
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const int part = lane % kLanes, first = warp * kKeys + lane / kLanes;
    const int kvHead = blockIdx.x / headsPerKv, here = int(*position), splits = gridDim.y;
    const int sequence = blockIdx.z, sequenceKvHead = sequence * (gridDim.x / headsPerKv) + kvHead;
    const size_t head = size_t(sequence) * gridDim.x + blockIdx.x;
    mask += size_t(sequence) * maskStride;
    const int length = ((here + splits) / splits + kSplitStep - 1) / kSplitStep * kSplitStep;
    const int from = blockIdx.y * length, end = min(here + 1, from + length);
    uint4* keyRows = reinterpret_cast<uint4*>(keys) + size_t(sequenceKvHead) * capacity * kLanes;
    uint4* valueRows = reinterpret_cast<uint4*>(values) + size_t(sequenceKvHead) * capacity * kLanes;
    // This lane's part of a row that lies `ahead` rows behind `at`. The token's own row is taken from where it comes from,
    // so that heads sharing a cache need not wait for it.
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
    const uint4 rawCosines = cosine ? reinterpret_cast<const uint4*>(cosine)[part] : zeros;
    const uint4 rawSines = cosine ? reinterpret_cast<const uint4*>(sine)[part] : zeros;
    // A row's values of this lane times `factor`, with the rotary embedding: each value has its partner half a row away.
    auto loadRotary = [&](const uint4* row, float factor, float (&own)[kVectorValues]) {
        constexpr int kHalf = kLanes / 2;
        const uint4 rawOwn = row[part], rawPartners = cosine ? row[part ^ kHalf] : zeros;
        unpack<kDtype>(rawOwn, own);
#pragma unroll
        for (int k = 0; k < kVectorValues; ++k) own[k] = rounded(own[k] * factor, kDtype);
        if (!cosine) return;
        float by[kVectorValues], partners[kVectorValues];
        unpack<kDtype>(rawCosines, by);
#pragma unroll
        for (int k = 0; k < kVectorValues; ++k) own[k] = rounded(own[k] * by[k], kDtype);
        unpack<kDtype>(rawSines, by);
        unpack<kDtype>(rawPartners, partners);
#pragma unroll
        for (int k = 0; k < kVectorValues; ++k) {
            const float partner = rounded(partners[k] * factor, kDtype);
            own[k] = rounded(own[k] + rounded((part < kHalf ? -partner : partner) * by[k], kDtype), kDtype);
        }
    };
    waitForPriorKernels();
    const uint4 ownValue = reinterpret_cast<const uint4*>(value + size_t(sequence) * valueStride)[kvHead * kLanes + part];
    float query[kVectorValues], found[kVectorValues];
    loadRotary(reinterpret_cast<const uint4*>(q + size_t(sequence) * queryStride) + size_t(blockIdx.x) * kLanes, queryScale, query);
    loadRotary(reinterpret_cast<const uint4*>(key + size_t(sequence) * keyStride) + size_t(kvHead) * kLanes, 1.0f, found);
    const uint4 ownKey = pack<kDtype>(found);
    if (blockIdx.y == 0 && blockIdx.x % headsPerKv == 0 && threadIdx.x < kLanes) {
        keyRows[size_t(here) * kLanes + threadIdx.x] = ownKey;
        valueRows[size_t(here) * kLanes + threadIdx.x] = ownValue;
    }

    const float none = __uint_as_float(kMinusInfinityBits);
    float largest = none;
    for (int start = from; start < end; start += kPass) {
        const uint32 nextCounts = start + kPass < end ? loadMask(start + kPass) : 0;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (i % kTogether == 0 && start + i * kStride >= end) break;  // the whole block
            const int row = start + first + i * kStride;
            unpack<kDtype>(row == here && row < end ? ownKey : keyVectors[i], found);
            keyVectors[i] = load(keyAt, i * kStride + kPass, row + kPass);
            float dot = 0.0f;
#pragma unroll
            for (int k = 0; k < kVectorValues; ++k) dot += query[k] * found[k];
            dot = laneSum<1, kLanes>(dot) * scale;
            if (!(counts >> i & 1)) dot = none;
            if (row < end && part == 0) scores[row - from] = dot;
            largest = fmaxf(largest, dot);
        }
        counts = nextCounts;
        keyAt += kPass * kLanes;
    }
    largest = laneMax(largest);
    if (lane == 0) room[warp] = largest;
    __syncthreads();
    largest = laneMax(lane < kAttentionWarps ? room[lane] : none);

    const float reference = largest == none ? 0.0f : largest;  // nothing counts: every weight is 0, not NaN
    float total = 0.0f, partial[kVectorValues] = {};
    for (int start = from; start < end; start += kPass) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (i % kTogether == 0 && start + i * kStride >= end) break;
            const int row = start + first + i * kStride;
            const float weight = row < end ? __expf(scores[row - from] - reference) : 0.0f;
            unpack<kDtype>(row == here && row < end ? ownValue : valueVectors[i], found);
            valueVectors[i] = load(valueAt, i * kStride + kPass, row + kPass);
#pragma unroll
            for (int k = 0; k < kVectorValues; ++k) partial[k] += weight * found[k];
            total += part == 0 ? weight : 0.0f;
        }
        valueAt += kPass * kLanes;
    }
    total = blockSum(total, room);
#pragma unroll
    for (int k = 0; k < kVectorValues; ++k) {
        partial[k] = laneSum<kLanes, kWarpSize>(partial[k]);
        if (lane < kLanes) parts[warp][part * kVectorValues + k] = partial[k];
    }
    __syncthreads();
    const size_t slot = head * splits + blockIdx.y;
    for (int column = threadIdx.x; column < kHeadDim; column += kThreads) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kAttentionWarps; ++w) sum += parts[w][column];
        if (splits == 1) {
            y[head * kHeadDim + column] = floatToShort(sum / total, kDtype);
        } else {
            sums[slot * kHeadDim + column] = sum;
        }
    }
    if (splits > 1 && threadIdx.x == 0) {
        weights[2 * slot] = largest;
        weights[2 * slot + 1] = total;
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
