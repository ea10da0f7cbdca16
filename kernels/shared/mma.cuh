// One-instruction wrappers: tensor cores, stores under a condition, launch dependencies. With copies.cuh the only file with
// such PTX.
#pragma once
#include "copies.cuh"
#include "pairs.cuh"

// D = C + popcount(A and B) on 16 x kBits by kBits x 8 bit matrices, one warp.
// Lane = 4 g + t. A: a[0] row g, a[1] row g + 8, bits 32 t .. 32 t + 31; a[2], a[3] the same rows 128 bits further.
// B: b[0] column g, bits 32 t ..; b[1] 128 bits further. C: c[0], c[1] row g, columns 2t, 2t + 1; c[2], c[3] row g + 8.
__device__ __forceinline__ void binaryMma128(int (&c)[4], uint32 a0, uint32 a1, uint32 b0) {
    asm(
        "mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(b0));
}

__device__ __forceinline__ void binaryMma256(int (&c)[4], uint4 a, uint32 b0, uint32 b1) {
    asm(
        "mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// D = popcount(A and B): the same on an empty sum.
__device__ __forceinline__ void binaryCount128(int (&d)[4], uint32 a0, uint32 a1, uint32 b0) {
    asm("mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a0), "r"(a1), "r"(b0), "r"(0));
}

__device__ __forceinline__ void binaryCount256(int (&d)[4], uint4 a, uint32 b0, uint32 b1) {
    asm("mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1), "r"(0));
}

// D = C + A B on fp16, 16 x 16 by 16 x 8, fp32 sums. Lane = 4 g + t, two elements per register. A: a.x row g, columns
// 2t, 2t + 1; a.y row g + 8; a.z, a.w the same rows 8 columns further. B: b0 rows 2t, 2t + 1 of column g; b1 8 rows
// further. C as binaryMma128.
__device__ __forceinline__ void halfMma16(float (&c)[4], uint4 a, uint32 b0, uint32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// D = C + A B on unsigned bytes, 16 x 32 by 32 x 8: the same lanes and registers as binaryMma256, 4 bytes for 32 bits.
__device__ __forceinline__ void byteMma32(int (&c)[4], uint4 a, uint32 b0, uint32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// D = C + A B on signed bytes: lanes and registers as byteMma32.
__device__ __forceinline__ void signedMma32(int (&d)[4], const int (&c)[4], uint4 a, uint32 b0, uint32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

// 2 to the x, off by at most 2 units in the last place; 0 for -inf.
__device__ __forceinline__ float powerOf2(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

// Four 8 x 16-byte matrices from shared memory: lane l gives the address of row l % 8 of matrix l / 8, and gets bytes
// 4 (l % 4) .. of row l / 4 of each.
__device__ __forceinline__ uint4 loadMatrices(uint32 shared) {
    uint4 m;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(m.x), "=r"(m.y), "=r"(m.z), "=r"(m.w)
                 : "r"(shared)
                 : "memory");
    return m;
}

// 2, 4, 8 or 16 bytes at an address in shared memory.
__device__ __forceinline__ uint16 loadShared2(uint32 shared) {
    uint16 value;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(shared) : "memory");
    return value;
}
__device__ __forceinline__ uint32 loadShared4(uint32 shared) {
    uint32 value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(shared) : "memory");
    return value;
}
__device__ __forceinline__ float2 loadShared8(uint32 shared) {
    float2 value;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(shared) : "memory");
    return value;
}
__device__ __forceinline__ uint4 loadShared16(uint32 shared) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(shared)
                 : "memory");
    return v;
}

// Byte n of the result: byte (selector >> 4 n) % 8 of `high` above `low`, or with bit 3 set eight times its top bit.
__device__ __forceinline__ uint32 selectBytes(uint32 low, uint32 high, uint32 selector) {
    uint32 bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selector));
    return bytes;
}

// Of two pairs of 16-bit floats the larger magnitude in each half; NaN wins.
template <int kDtype>
__device__ __forceinline__ uint32 largestMagnitudes(uint32 a, uint32 b) {
    uint32 larger;
    if constexpr (kDtype == kFloat16) {
        asm("{.reg .b32 m;\nabs.f16x2 m, %2;\nmax.NaN.f16x2 %0, %1, m;\n}" : "=r"(larger) : "r"(a), "r"(b));
    } else {
        asm("{.reg .b32 m;\nabs.bf16x2 m, %2;\nmax.NaN.bf16x2 %0, %1, m;\n}" : "=r"(larger) : "r"(a), "r"(b));
    }
    return larger;
}

// Of two pairs of 16-bit floats the larger in each half, of a and of -b with kNegated; NaN wins.
template <int kDtype, bool kNegated>
__device__ __forceinline__ uint32 largestPairs(uint32 a, uint32 b) {
    uint32 larger;
    if constexpr (kNegated) {
        if constexpr (kDtype == kFloat16) asm("neg.f16x2 %0, %0;" : "+r"(b));
        else asm("neg.bf16x2 %0, %0;" : "+r"(b));
    }
    if constexpr (kDtype == kFloat16) asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    else asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}

// The larger of |a| and |b|, NaN where one of them is.
__device__ __forceinline__ float largerMagnitude(float a, float b) {
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(fabsf(a)), "f"(fabsf(b)));
    return larger;
}

// The same of two pairs of 16-bit floats at once.
template <int kDtype>
__device__ __forceinline__ uint32 largerMagnitudes(uint32 a, uint32 b) {
    static_assert(kDtype == kFloat16 || kDtype == kBfloat16, "16-bit types only");
    uint32 larger;
    if constexpr (kDtype == kFloat16) {
        asm("{.reg .b32 p, q;\n\tabs.f16x2 p, %1;\n\tabs.f16x2 q, %2;\n\tmax.NaN.f16x2 %0, p, q;}"
            : "=r"(larger) : "r"(a), "r"(b));
    } else {
        asm("{.reg .b32 p, q;\n\tabs.bf16x2 p, %1;\n\tabs.bf16x2 q, %2;\n\tmax.NaN.bf16x2 %0, p, q;}"
            : "=r"(larger) : "r"(a), "r"(b));
    }
    return larger;
}

// sum + both signed halves of a word.
__device__ __forceinline__ int addHalves(uint32 halves, int sum) {
    asm("dp2a.lo.s32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(halves), "r"(0x0101));
    return sum;
}

// The upper half of a word. By a product, as shifts share a pipe with byte permutations.
__device__ __forceinline__ uint32 upperHalf(uint32 word) {
    uint32 half;
    asm("dp2a.lo.u32.u32 %0, %1, %2, %3;" : "=r"(half) : "r"(word), "r"(0x0100), "r"(0));
    return half;
}

// sum + all four signed bytes of a word.
__device__ __forceinline__ int addBytes(uint32 bytes, int sum) {
    asm("dp4a.s32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(bytes), "r"(0x01010101));
    return sum;
}

// Hides where a value came from, so that the compiler keeps it and does not work it out again in every pass of a loop.
template <class Value>
__device__ __forceinline__ void keepInRegister(Value& value) {
    if constexpr (sizeof(Value) == 8) {
        asm("" : "+l"(value));
    } else {
        asm("" : "+r"(value));
    }
}

// Store 16 bytes, or nothing. Without a branch, and without ordering other accesses, so that the loads of what is stored
// next go ahead of it: only for memory that the kernel does not read.
__device__ __forceinline__ void store16If(bool wanted, void* to, uint32 a, uint32 b, uint32 c, uint32 d) {
    asm volatile("{.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p st.global.v4.b32 [%1], {%2, %3, %4, %5};\n}" ::"r"(
                     int(wanted)),
                 "l"(to), "r"(a), "r"(b), "r"(c), "r"(d));
}

// Under a programmatic dependent launch: wait for the kernels before this one. No effect otherwise.
__device__ __forceinline__ void waitForPriorKernels() {
#if QK_OVERLAP
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Under a programmatic dependent launch: let the next kernel's blocks start once every block said so or ended.
__device__ __forceinline__ void allowNextKernel() {
#if QK_OVERLAP
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Bring the line of an address into L2.
__device__ __forceinline__ void prefetchL2(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" :: "l"(address));
}

// D = C + A B on 16-bit floats of type kDtype: lanes and registers as halfMma16.
template <int kDtype>
__device__ __forceinline__ void shortMma16(float* c, uint4 a, uint32 b0, uint32 b1) {
    static_assert(kDtype == kFloat16 || kDtype == kBfloat16, "16-bit types only");
    if constexpr (kDtype == kFloat16) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
    }
}

// D = A B: the same on an empty sum.
template <int kDtype>
__device__ __forceinline__ void shortProduct16(float* d, uint4 a, uint32 b0, uint32 b1) {
    static_assert(kDtype == kFloat16 || kDtype == kBfloat16, "16-bit types only");
    if constexpr (kDtype == kFloat16) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1), "f"(0.0f));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
            : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
            : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1), "f"(0.0f));
    }
}

// One byte at an address in shared memory; 4, 8 or 16 bytes to one.
__device__ __forceinline__ uint8 loadShared1(uint32 shared) {
    uint32 value;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(shared) : "memory");
    return uint8(value);
}
__device__ __forceinline__ uint2 loadSharedWords(uint32 shared) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(shared) : "memory");
    return v;
}
__device__ __forceinline__ void storeShared4(uint32 shared, uint32 value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared), "r"(value) : "memory");
}
__device__ __forceinline__ void storeShared8(uint32 shared, uint32 a, uint32 b) {
    asm volatile("st.shared.v2.u32 [%0], {%1,%2};" ::"r"(shared), "r"(a), "r"(b) : "memory");
}
__device__ __forceinline__ void storeShared16(uint32 shared, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(shared), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

// Two 8 x 16-byte matrices, as loadMatrices.
__device__ __forceinline__ uint2 loadTwoMatrices(uint32 shared) {
    uint2 m;
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(m.x), "=r"(m.y)
                 : "r"(shared)
                 : "memory");
    return m;
}

// An 8 x 8 matrix of 16-bit elements, lane 4 g + t with columns 2 t and 2 t + 1 of row g, transposed.
__device__ __forceinline__ uint32 transposed(uint32 pair) {
    uint32 result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
}

// Memory barriers at a shared address, on every GPU here; wgmma.cuh has what only Hopper does with them. They keep their
// default scope: a cluster-wide acquire or release becomes a GPU-wide memory fence, and what they guard needs none.
__device__ __forceinline__ void barrierInit(uint32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrierArrive(uint32 barrier) {
    asm volatile("{.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}
// An arrival once the copies that this thread has asked for are there.
__device__ __forceinline__ void barrierArriveBehindCopies(uint32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrierWait(uint32 barrier, uint32 parity) {
    uint32 done;
    do {
#if __CUDA_ARCH__ >= 900
        asm volatile("{.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
#else
        asm volatile("{.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
#endif
    } while (!done);
}

// Barrier ``id`` (1-15) of the block among ``threads`` threads: wait, or arrive without waiting.
__device__ __forceinline__ void namedSync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void namedArrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
