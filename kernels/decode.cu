// The small kernels between the products of one decoding step: norms, attention of a single token with its KV cache,
// gated activations. All read and write fp16 or bf16 and compute in fp32; sums have a fixed order.
#include "finish.cuh"
#include "mma.cuh"

namespace {

constexpr int kVectorValues = 8;  // 16-bit elements per 16-byte access
constexpr int kNormThreads = 512;
constexpr int kAttentionWarps = 16, kBatch = 8;
constexpr int kTogether = 2;  // rows of a batch from one look at the end to the next, so that their latencies overlap
constexpr int kGatedThreads = 128;
constexpr uint32 kMinusInfinityBits = 0xff800000;

template <int kDtype>
__device__ __forceinline__ void unpack(const uint4& raw, float (&values)[kVectorValues]) {
    const uint32 pairs[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        values[2 * i] = shortToFloat(uint16(pairs[i]), kDtype);
        values[2 * i + 1] = shortToFloat(uint16(pairs[i] >> 16), kDtype);
    }
}

template <int kDtype>
__device__ __forceinline__ uint4 pack(const float (&values)[kVectorValues]) {
    uint32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        pairs[i] = floatToShort(values[2 * i], kDtype) | uint32(floatToShort(values[2 * i + 1], kDtype)) << 16;
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Sum over the block; every thread gets it. `room`: one float per warp, free again at the next call's barrier.
__device__ __forceinline__ float blockSum(float value, float* room) {
    const int lane = threadIdx.x % kWarpSize, warps = blockDim.x / kWarpSize;
    value = laneSum<1, kWarpSize>(value);
    __syncthreads();
    if (lane == 0) room[threadIdx.x / kWarpSize] = value;
    __syncthreads();
    return laneSum<1, kWarpSize>(lane < warps ? room[lane] : 0.0f);
}

__device__ __forceinline__ float laneMax(float value) {
#pragma unroll
    for (int mask = 1; mask < kWarpSize; mask *= 2) value = fmaxf(value, __shfl_xor_sync(kFullWarp, value, mask));
    return value;
}

}  // namespace

// y = (x - mean) / sqrt(var + eps) * weight + bias, or without a mean (kCentered = false) y = round(x / rms) * weight.
// With `addend`, x is first replaced by sum = round(x + addend), which is written too.
// Grid: one block per row. columns a multiple of 8, at most kNormThreads * kVectors * 8.
template <bool kCentered, int kDtype, int kVectors>
__global__ void __launch_bounds__(kNormThreads)
decodeNorm(const uint16* x,                    // [rows, columns]; written until the wait, so not __restrict__
           const uint16* addend,               // [rows, columns], or null with sum
           const uint16* __restrict__ weight,  // [columns]
           const uint16* __restrict__ bias,    // [columns], or null
           uint16* __restrict__ sum,           // [rows, columns]
           uint16* __restrict__ y,             // [rows, columns]
           int columns, float epsilon) {
    __shared__ float room[kNormThreads / kWarpSize];
    allowNextKernel();
    const int vectors = columns / kVectorValues;
    uint4 scaleVectors[kVectors], shiftVectors[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {  // no kernel writes these
        const int vector = threadIdx.x + i * kNormThreads;
        const bool inside = vector < vectors;
        scaleVectors[i] = inside ? reinterpret_cast<const uint4*>(weight)[vector] : make_uint4(0, 0, 0, 0);
        shiftVectors[i] = inside && bias ? reinterpret_cast<const uint4*>(bias)[vector] : make_uint4(0, 0, 0, 0);
    }
    waitForPriorKernels();
    const size_t row = size_t(blockIdx.x) * columns;
    uint4 raw[kVectors], addendRaw[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        const int vector = threadIdx.x + i * kNormThreads;
        const bool inside = vector < vectors;
        raw[i] = inside ? reinterpret_cast<const uint4*>(x + row)[vector] : make_uint4(0, 0, 0, 0);
        addendRaw[i] = make_uint4(0, 0, 0, 0);
        if (inside && addend) addendRaw[i] = reinterpret_cast<const uint4*>(addend + row)[vector];
    }
    float values[kVectors][kVectorValues];
    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        const int vector = threadIdx.x + i * kNormThreads;
        unpack<kDtype>(raw[i], values[i]);
        if (addend) {
            float addends[kVectorValues];
            unpack<kDtype>(addendRaw[i], addends);
#pragma unroll
            for (int k = 0; k < kVectorValues; ++k) values[i][k] = rounded(values[i][k] + addends[k], kDtype);
            if (vector < vectors) reinterpret_cast<uint4*>(sum + row)[vector] = pack<kDtype>(values[i]);
        }
#pragma unroll
        for (int k = 0; k < kVectorValues; ++k) total += values[i][k];
    }
    const float mean = kCentered ? blockSum(total, room) / columns : 0.0f;
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        if (threadIdx.x + i * kNormThreads < vectors) {
#pragma unroll
            for (int k = 0; k < kVectorValues; ++k) squares += (values[i][k] - mean) * (values[i][k] - mean);
        }
    }
    const float inverse = rsqrtf(blockSum(squares, room) / columns + epsilon);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        const int vector = threadIdx.x + i * kNormThreads;
        if (vector < vectors) {
            float scales[kVectorValues], shifts[kVectorValues];
            unpack<kDtype>(scaleVectors[i], scales);
            unpack<kDtype>(shiftVectors[i], shifts);
#pragma unroll
            for (int k = 0; k < kVectorValues; ++k) {
                float normal = (values[i][k] - mean) * inverse;
                if (!kCentered) normal = rounded(normal, kDtype);
                values[i][k] = normal * scales[k] + shifts[k];
            }
            reinterpret_cast<uint4*>(y + row)[vector] = pack<kDtype>(values[i]);
        }
    }
}

// y[h] = softmax(scale * round(queryScale * q[h]) . keys + mask) . values over one token's cache, for every head of one
// token, whose own key and value go into the cache on the way. With `cosine`, the query behind its rounding and the own
// key are turned first. Grid: one block per head. kHeadDim / 8 lanes work on one key. Nothing is in the cache behind
// `position`. Only q, key and value may still be written when the kernel starts: the rest is read meanwhile, and from
// memory, since a token's weights push it out of L2. Shared memory: `capacity` floats.
template <int kHeadDim, int kDtype>
__global__ void __launch_bounds__(kAttentionWarps * kWarpSize)
decodeAttention(const uint16* q,                    // [heads, kHeadDim]; written until the wait, so not __restrict__
                const uint16* key,                  // [kv heads, kHeadDim] of the token
                const uint16* value,
                uint16* keys,                       // [kv heads, capacity, kHeadDim]
                uint16* values,
                const uint8* __restrict__ mask,     // [capacity], which positions count
                const long long* __restrict__ position,
                const uint16* __restrict__ cosine,  // [kHeadDim], or null with sine
                const uint16* __restrict__ sine,
                uint16* __restrict__ y,             // [heads, kHeadDim]
                int headsPerKv, int capacity, float queryScale, float scale) {
    constexpr int kLanes = kHeadDim / kVectorValues, kKeys = kWarpSize / kLanes, kStride = kKeys * kAttentionWarps;
    extern __shared__ float scores[];
    __shared__ float room[kAttentionWarps];
    __shared__ float parts[kAttentionWarps][kHeadDim];
    allowNextKernel();
    const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
    const int part = lane % kLanes, first = warp * kKeys + lane / kLanes;
    const int kvHead = blockIdx.x / headsPerKv, here = int(*position), end = here + 1;
    uint4* keyRows = reinterpret_cast<uint4*>(keys) + size_t(kvHead) * capacity * kLanes;
    uint4* valueRows = reinterpret_cast<uint4*>(values) + size_t(kvHead) * capacity * kLanes;
    auto load = [&](uint4 (&raw)[kBatch], const uint4* rows, int start) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int row = start + first + i * kStride;
            raw[i] = row < here ? rows[size_t(row) * kLanes + part] : make_uint4(0, 0, 0, 0);
        }
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
    // The token's own row is taken from where it comes from, so that heads sharing a cache need not wait for it.
    auto insert = [&](uint4 (&raw)[kBatch], const uint4& own, int start) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (start + first + i * kStride == here) raw[i] = own;
        }
    };
    uint4 keyVectors[kBatch], valueVectors[kBatch];
    load(keyVectors, keyRows, 0);
    load(valueVectors, valueRows, 0);
    uint32 counts = loadMask(0);
    float cosines[kVectorValues], sines[kVectorValues];
    if (cosine) {
        unpack<kDtype>(reinterpret_cast<const uint4*>(cosine)[part], cosines);
        unpack<kDtype>(reinterpret_cast<const uint4*>(sine)[part], sines);
    }
    // A row's values of this lane times `factor`, turned: each with its partner half a row away.
    auto loadTurned = [&](const uint4* row, float factor, float (&own)[kVectorValues]) {
        constexpr int kHalf = kLanes / 2;
        float partners[kVectorValues];
        const uint4 rawOwn = row[part], rawPartners = cosine ? row[part ^ kHalf] : rawOwn;
        unpack<kDtype>(rawOwn, own);
        unpack<kDtype>(rawPartners, partners);
#pragma unroll
        for (int k = 0; k < kVectorValues; ++k) {
            own[k] = rounded(own[k] * factor, kDtype);
            if (cosine) {
                const float partner = rounded(partners[k] * factor, kDtype);
                const float across = rounded((part < kHalf ? -partner : partner) * sines[k], kDtype);
                own[k] = rounded(rounded(own[k] * cosines[k], kDtype) + across, kDtype);
            }
        }
    };
    waitForPriorKernels();
    const uint4 ownValue = reinterpret_cast<const uint4*>(value)[kvHead * kLanes + part];
    float query[kVectorValues], found[kVectorValues];
    loadTurned(reinterpret_cast<const uint4*>(q) + size_t(blockIdx.x) * kLanes, queryScale, query);
    loadTurned(reinterpret_cast<const uint4*>(key) + size_t(kvHead) * kLanes, 1.0f, found);
    const uint4 ownKey = pack<kDtype>(found);
    if (blockIdx.x % headsPerKv == 0 && threadIdx.x < kLanes) {
        keyRows[size_t(here) * kLanes + threadIdx.x] = ownKey;
        valueRows[size_t(here) * kLanes + threadIdx.x] = ownValue;
    }

    const float none = __uint_as_float(kMinusInfinityBits);
    float largest = none;
    for (int start = 0; start < end; start += kStride * kBatch) {
        if (start > 0) {
            load(keyVectors, keyRows, start);
            counts = loadMask(start);
        }
        insert(keyVectors, ownKey, start);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (i % kTogether == 0 && start + i * kStride >= end) break;  // the whole block
            const int row = start + first + i * kStride;
            float dot = 0.0f;
            unpack<kDtype>(keyVectors[i], found);
#pragma unroll
            for (int k = 0; k < kVectorValues; ++k) dot += query[k] * found[k];
            dot = laneSum<1, kLanes>(dot) * scale;
            if (!(counts >> i & 1)) dot = none;
            if (row < end && part == 0) scores[row] = dot;
            largest = fmaxf(largest, dot);
        }
    }
    largest = laneMax(largest);
    if (lane == 0) room[warp] = largest;
    __syncthreads();
    largest = laneMax(lane < kAttentionWarps ? room[lane] : none);

    float total = 0.0f, sums[kVectorValues] = {};
    for (int start = 0; start < end; start += kStride * kBatch) {
        if (start > 0) load(valueVectors, valueRows, start);
        insert(valueVectors, ownValue, start);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            if (i % kTogether == 0 && start + i * kStride >= end) break;
            const int row = start + first + i * kStride;
            const float weight = row < end ? __expf(scores[row] - largest) : 0.0f;
            unpack<kDtype>(valueVectors[i], found);
#pragma unroll
            for (int k = 0; k < kVectorValues; ++k) sums[k] += weight * found[k];
            total += part == 0 ? weight : 0.0f;
        }
    }
    total = blockSum(total, room);
#pragma unroll
    for (int k = 0; k < kVectorValues; ++k) {
        sums[k] = laneSum<kLanes, kWarpSize>(sums[k]);
        if (lane < kLanes) parts[warp][part * kVectorValues + k] = sums[k];
    }
    __syncthreads();
    for (int column = threadIdx.x; column < kHeadDim; column += kAttentionWarps * kWarpSize) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kAttentionWarps; ++w) sum += parts[w][column];
        y[size_t(blockIdx.x) * kHeadDim + column] = floatToShort(sum / total, kDtype);
    }
}

// y = round(activation(gate)) * up.
template <int kDtype>
__global__ void __launch_bounds__(kGatedThreads)
decodeGated(const uint16* gate,  // [count], a multiple of 8
            const uint16* up,    // [count]
            uint16* y,           // [count]
            int count, int activation) {
    allowNextKernel();
    waitForPriorKernels();
    const int vector = blockIdx.x * kGatedThreads + threadIdx.x;
    if (vector >= count / kVectorValues) return;
    float gates[kVectorValues], values[kVectorValues];
    unpack<kDtype>(reinterpret_cast<const uint4*>(gate)[vector], gates);
    unpack<kDtype>(reinterpret_cast<const uint4*>(up)[vector], values);
#pragma unroll
    for (int k = 0; k < kVectorValues; ++k) {
        values[k] *= rounded(activatedBy(gates[k], activation, kDtype), kDtype);
    }
    reinterpret_cast<uint4*>(y)[vector] = pack<kDtype>(values);
}
