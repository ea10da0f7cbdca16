// The most probable token of a decoding step, written where the next step and the caller read it.
//
// The largest logit wins, of equal ones the first. NaN is larger than every number, as it is for torch.
#include "decode.cuh"

namespace {

constexpr int kChooseThreads = QK_CHOOSE_THREADS, kChooseWarps = kChooseThreads / kWarpSize;
constexpr int kNowhere = 0x7FFFFFFF;  // the place of a thread without logits

// Greater for what is chosen first.
__device__ __forceinline__ uint64 rankOf(float value, int place) {
    const uint32 bits = __float_as_uint(value + 0.0f);  // -0 becomes 0
    const uint32 order = value != value ? ~0u : bits ^ (int(bits) < 0 ? ~0u : 1u << 31);
    return uint64(order) << 32 | ~uint32(place);
}

__device__ __forceinline__ uint64 highestOfWarp(uint64 rank) {
#pragma unroll
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
        rank = max(rank, __shfl_xor_sync(kFullWarp, rank, distance));
    }
    return rank;
}

}  // namespace

// Grid: one block per sequence.
template <int kDtype>
__global__ void __launch_bounds__(kChooseThreads)
decodeChoose(const uint16* logits,       // [B, vocabulary], rows `stride` elements apart
             long long* token,           // [B]
             long long* tokens,          // [B, capacity]
             const long long* position,  // [1], the token's in `tokens`
             int vocabulary, int stride, int capacity,
             int vectors) {              // 16-byte vectors of a row that are aligned, or 0
    __shared__ uint64 room[kChooseWarps];
    allowNextKernel();
    waitForPriorKernels();
    const uint16* row = logits + size_t(blockIdx.x) * stride;
    const int first = vectors > 0 ? threadIdx.x * kVectorValues : threadIdx.x, lane = threadIdx.x % kWarpSize;
    float best = -__int_as_float(0x7F800000);
    int place = first < vocabulary ? first : kNowhere;
    const auto take = [&](float value, int i) {
        if (!(value <= best) && best == best) best = value, place = i;
    };
#pragma unroll 4
    for (int vector = threadIdx.x; vector < vectors; vector += kChooseThreads) {
        float values[kVectorValues];
        unpack<kDtype>(reinterpret_cast<const uint4*>(row)[vector], values);
#pragma unroll
        for (int i = 0; i < kVectorValues; ++i) take(values[i], vector * kVectorValues + i);
    }
    for (int i = vectors * kVectorValues + threadIdx.x; i < vocabulary; i += kChooseThreads) {
        take(shortToFloat(row[i], kDtype), i);
    }
    const uint64 ofWarp = highestOfWarp(rankOf(best, place));
    if (lane == 0) room[threadIdx.x / kWarpSize] = ofWarp;
    __syncthreads();
    if (threadIdx.x >= kWarpSize) return;
    const uint64 highest = highestOfWarp(lane < kChooseWarps ? room[lane] : 0);
    if (lane > 0) return;
    const long long chosen = ~uint32(highest);
    token[blockIdx.x] = chosen;
    tokens[size_t(blockIdx.x) * capacity + position[0]] = chosen;
}
