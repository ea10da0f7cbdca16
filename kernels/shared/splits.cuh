// Sums of an item whose k tiles the two blocks of a cluster share: each finishes half of them, which the other sends into its
// shared memory. Both end at one time; blocks that share by memory (SharedItem) end one after the other, and take longer.
#pragma once
#include "items.cuh"

// Four sums as the bits that a mailbox takes, and such added to four sums.
struct FourBits {
    float bits[4];

    __device__ __forceinline__ explicit FourBits(const float* sums) : bits{sums[0], sums[1], sums[2], sums[3]} {}
    __device__ __forceinline__ explicit FourBits(const int* sums)
        : bits{__int_as_float(sums[0]), __int_as_float(sums[1]), __int_as_float(sums[2]), __int_as_float(sums[3])} {}
};
__device__ __forceinline__ void addBits(float* sums, const uint4& part) {
    sums[0] += __uint_as_float(part.x), sums[1] += __uint_as_float(part.y);
    sums[2] += __uint_as_float(part.z), sums[3] += __uint_as_float(part.w);
}
__device__ __forceinline__ void addBits(int* sums, const uint4& part) {
    sums[0] += int(part.x), sums[1] += int(part.y), sums[2] += int(part.z), sums[3] += int(part.w);
}

// Of kSums sums of each of kThreads threads, a multiple of 8: a block finishes the first or the last half, by its rank.
//
//   received     [four sums][thread] float4
template <int kSums, int kThreads>
struct SplitSums {
    static constexpr int kFours = kSums / 4, kOwn = kFours / 2;
    static constexpr uint32 kBytes = kOwn * kThreads * sizeof(float4);
    static_assert(kSums % 8 == 0, "halves of whole vectors");

    static __device__ __forceinline__ bool finishes(int four) { return (four >= kOwn) == (clusterRank() > 0); }

    // By all of the threads, which have arrived at the mailbox. received: a shared address, the same in both blocks.
    template <class Sum>
    static __device__ __forceinline__ void exchange(Sum* acc, Mailbox& mailbox, uint32 received) {
        const uint32 rank = clusterRank(), own = received + threadIdx.x * uint32(sizeof(float4));
        mailbox.waitForOthers();
        if (threadIdx.x == 0) mailbox.expect(kBytes);
#pragma unroll
        for (int four = 0; four < kFours; ++four) {
            if (finishes(four)) continue;
            mailbox.send(own + four % kOwn * kThreads * uint32(sizeof(float4)), FourBits(acc + 4 * four).bits, rank ^ 1);
        }
        mailbox.receive();
#pragma unroll
        for (int four = 0; four < kFours; ++four) {
            if (!finishes(four)) continue;
            addBits(acc + 4 * four, loadShared16(own + four % kOwn * kThreads * uint32(sizeof(float4))));
        }
    }
};
