// Counts in global memory by which the blocks of a launch wait for each other (quantkit/cuda/counts.py): zero before it,
// and again behind it, as the `all`th that is added begins anew.
#pragma once
#include "common.cuh"

// Add one behind all that this thread wrote or saw written.
__device__ __forceinline__ void releaseCount(uint32* count, uint32 all) {
    asm volatile("red.release.gpu.global.inc.u32 [%0], %1;" ::"l"(count), "r"(all - 1) : "memory");
}

// Add one without that promise.
__device__ __forceinline__ void addToCount(uint32* count, uint32 all) {
    asm volatile("red.relaxed.gpu.global.inc.u32 [%0], %1;" ::"l"(count), "r"(all - 1) : "memory");
}

// Read it ahead of what it allows to be read.
__device__ __forceinline__ uint32 acquireCount(const uint32* count) {
    uint32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(count) : "memory");
    return value;
}
