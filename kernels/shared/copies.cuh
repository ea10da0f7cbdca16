// Asynchronous copies of 16 bytes from global to shared memory.
#pragma once
#include "common.cuh"

__device__ __forceinline__ uint32 sharedAddress(const void* pointer) {
    return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

// Copy 16 bytes from global to shared memory, past L1; complete after copyWait in the issuing thread.
__device__ __forceinline__ void copyAsync16(uint32 shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

// Of bytes that nothing reads again: they leave L2 before others do.
__device__ __forceinline__ uint64 readOnce() {
    uint64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void copyAsyncOnce16(uint32 shared, const void* global) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "l"(readOnce())
                 : "memory");
}

// The same of either under a condition, and nothing otherwise.
__device__ __forceinline__ void copyAsync16If(uint32 shared, const void* global, bool present) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %2, 0;\n@p cp.async.cg.shared.global [%0], [%1], 16;\n}" ::"r"(shared), "l"(global),
                 "r"(uint32(present))
                 : "memory");
}
__device__ __forceinline__ void copyAsyncOnce16If(uint32 shared, const void* global, bool present) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.u32 p, %3, 0;\n@p cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;\n}" ::"r"(shared),
                 "l"(global), "l"(readOnce()), "r"(uint32(present))
                 : "memory");
}

// As either, or 16 zero bytes.
__device__ __forceinline__ void copyAsync16Or0(uint32 shared, const void* global, bool present) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(present ? 16 : 0)
                 : "memory");
}
__device__ __forceinline__ void copyAsyncOnce16Or0(uint32 shared, const void* global, bool present) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared), "l"(global),
                 "r"(present ? 16 : 0), "l"(readOnce())
                 : "memory");
}

__device__ __forceinline__ void copyCommit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most kPending of this thread's newest groups are unfinished.
template <int kPending>
__device__ __forceinline__ void copyWait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
