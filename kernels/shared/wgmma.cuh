// One-instruction wrappers for Hopper (sm_90a): warpgroup products, memory barriers, bulk copies.
#pragma once
#include "mma.cuh"

constexpr int kWarpgroup = 128;       // threads that issue one product together
constexpr int kWgmmaRows = 64;        // rows of A and D of every warpgroup product
constexpr int kWgmmaDepthBytes = 32;  // bytes of K of every warpgroup product: 256 bits or 32 bytes
constexpr int kSwizzleBytes = 128;    // a row of a shared-memory operand; its 16-byte chunks are XORed with row % 8

enum ProductKind : int { kBinary = 0, kUnsignedBytes = 1 };

// Descriptor of a K-major operand at a shared address: rows of 128 bytes, 128-byte swizzle, 8 rows = 1024 bytes.
__device__ __forceinline__ constexpr uint64 operandDescriptor(uint32 shared) {
    constexpr uint64 kLeading = uint64(1) << 16;       // ignored under a swizzle
    constexpr uint64 kStride = uint64(1024 >> 4) << 32;  // from 8 rows to the next 8
    constexpr uint64 kSwizzle128 = uint64(1) << 62;
    return uint64((shared & 0x3FFFF) >> 4) | kLeading | kStride | kSwizzle128;
}

__device__ __forceinline__ void productFence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void productCommit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until at most kPending of this warpgroup's newest groups of products are unfinished.
template <int kPending>
__device__ __forceinline__ void productWait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Register lists of the accumulators: names %0 .. %(n-1) in the text, the same elements of d as operands.
#define WG_T0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9"
#define WG_T(t) ",%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9"
#define WG_L32 WG_T0 WG_T(1) WG_T(2) ",%30,%31"
#define WG_L64 WG_T0 WG_T(1) WG_T(2) WG_T(3) WG_T(4) WG_T(5) ",%60,%61,%62,%63"
#define WG_L80 WG_T0 WG_T(1) WG_T(2) WG_T(3) WG_T(4) WG_T(5) WG_T(6) WG_T(7)
#define WG_L96 WG_L80 WG_T(8) ",%90,%91,%92,%93,%94,%95"
#define WG_L112 WG_L80 WG_T(8) WG_T(9) WG_T(10) ",%110,%111"
#define WG_L128 WG_L80 WG_T(8) WG_T(9) WG_T(10) WG_T(11) ",%120,%121,%122,%123,%124,%125,%126,%127"
#define WG_D8(i) \
    "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]), "+r"(d[i + 6]), \
        "+r"(d[i + 7])
#define WG_D32 WG_D8(0), WG_D8(8), WG_D8(16), WG_D8(24)
#define WG_D64 WG_D32, WG_D8(32), WG_D8(40), WG_D8(48), WG_D8(56)
#define WG_D80 WG_D64, WG_D8(64), WG_D8(72)
#define WG_D96 WG_D80, WG_D8(80), WG_D8(88)
#define WG_D112 WG_D96, WG_D8(96), WG_D8(104)
#define WG_D128 WG_D112, WG_D8(112), WG_D8(120)

template <ProductKind kKind, int kColumns>
struct WarpgroupProduct;

// regs = columns / 2 accumulators; operands regs, regs + 1: descriptors; operand regs + 2: keep (0 starts from zero).
#define WG_PRODUCT(kind, columns, shape, types, regs, a, b, k) \
    template <> \
    struct WarpgroupProduct<kind, columns> { \
        __device__ static __forceinline__ void add(int* d, uint64 descA, uint64 descB, int keep) { \
            asm volatile("{.reg .pred p; setp.ne.b32 p, %" #k ", 0;\nwgmma.mma_async.sync.aligned." shape types \
                         " {" WG_L##regs "}, %" #a ", %" #b ", p;\n}" \
                         : WG_D##regs \
                         : "l"(descA), "l"(descB), "r"(keep)); \
        } \
    };
#define WG_BINARY(columns, regs, a, b, k) \
    WG_PRODUCT(kBinary, columns, "m64n" #columns "k256", ".s32.b1.b1.and.popc", regs, a, b, k)
#define WG_BYTES(columns, regs, a, b, k) \
    WG_PRODUCT(kUnsignedBytes, columns, "m64n" #columns "k32", ".s32.u8.u8", regs, a, b, k)

// D[64, columns] += popcount(A and B): d[4 c + e] of thread 32 w + 4 g + t of the warpgroup is
// row 16 w + g + 8 (e / 2), column 8 c + 2 t + e % 2.
WG_BINARY(64, 32, 32, 33, 34)
WG_BINARY(128, 64, 64, 65, 66)
WG_BINARY(160, 80, 80, 81, 82)
WG_BINARY(192, 96, 96, 97, 98)
WG_BINARY(224, 112, 112, 113, 114)
WG_BINARY(256, 128, 128, 129, 130)
// The same for unsigned bytes.
WG_BYTES(64, 32, 32, 33, 34)
WG_BYTES(128, 64, 64, 65, 66)
WG_BYTES(256, 128, 128, 129, 130)

__device__ __forceinline__ void barrierInit(uint64* barrier, int arrivals) { barrierInit(sharedAddress(barrier), arrivals); }
__device__ __forceinline__ void barrierArrive(uint64* barrier) { barrierArrive(sharedAddress(barrier)); }

// Wait for the phase of this parity to complete.
__device__ __forceinline__ void barrierWait(uint64* barrier, uint32 parity) {
    barrierWait(sharedAddress(barrier), parity);
}

// Makes barrierInit visible to bulk copies.
__device__ __forceinline__ void barrierInitFence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrive, and let the phase wait for ``bytes`` of bulk copies too.
__device__ __forceinline__ void barrierExpect(uint32 barrier, uint32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrierExpect(uint64* barrier, uint32 bytes) {
    barrierExpect(sharedAddress(barrier), bytes);
}

// Copy global bytes (a multiple of 16, both ends aligned to 16) to shared memory; the barrier counts them.
__device__ __forceinline__ void copyBulk(uint32 shared, const void* global, uint32 bytes, uint32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
        "l"(global), "r"(bytes), "r"(barrier)
        : "memory");
}
__device__ __forceinline__ void copyBulk(uint32 shared, const void* global, uint32 bytes, uint64* barrier) {
    copyBulk(shared, global, bytes, sharedAddress(barrier));
}

// The same to the same address in both blocks of a cluster, whose own barriers at this address count the bytes.
__device__ __forceinline__ void copyBulkToPair(uint32 shared, const void* global, uint32 bytes, uint32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(
            shared),
        "l"(global), "r"(bytes), "r"(barrier), "h"(uint16(3))
        : "memory");
}

// How a tensor in global memory is copied by boxes: made by the driver (quantkit/cuda/tensor_map.py), opaque. Kernels take
// it as a const __grid_constant__ parameter.
struct alignas(64) TensorMap {
    uint64 opaque[16];
};

// Bring a map to where copies read it.
__device__ __forceinline__ void prefetchTensorMap(const void* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copy the box from this column and row on to shared memory; the barrier counts all of its bytes.
__device__ __forceinline__ void copyBox(uint32 shared, const void* map, int column, int row, uint32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            shared),
        "l"(map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

// The same to the same address in both blocks of a cluster, whose own barriers at this address count the bytes.
__device__ __forceinline__ void copyBoxToPair(uint32 shared, const void* map, int column, int row, uint32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], "
        "[%4], %5;" ::"r"(shared),
        "l"(map), "r"(column), "r"(row), "r"(barrier), "h"(uint16(3))
        : "memory");
}

// Bulk copies of kBlocks neighbouring blocks of tiles, k tile after k tile of kStep bytes; blocks behind the last copy it
// again.
template <int kBlocks, uint32 kStep>
struct BlockCopies {
    const uint8* source[kBlocks];

    __device__ __forceinline__ BlockCopies(const uint8* tiles, int first, int last, int kTiles) {
#pragma unroll
        for (int b = 0; b < kBlocks; b++) source[b] = tiles + size_t(min(first + b, last)) * kTiles * kStep;
    }
    __device__ __forceinline__ void start(uint32 shared, uint64* full, int kTile) const {
#pragma unroll
        for (int b = 0; b < kBlocks; b++) copyBulk(shared + b * kStep, source[b] + kTile * kStep, kStep, full);
    }
};

// True in one lane of the warp, all of which must call it. Behind it the compiler knows of a single lane and takes the
// operands of bulk copies as they are; behind a comparison with a lane number it makes a loop over lanes of each copy.
__device__ __forceinline__ bool electLane() {
    uint32 elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected));
    return elected != 0;
}

// A number that all lanes of a warp have. Behind it the compiler knows so, and computes what follows once for the warp.
__device__ __forceinline__ uint32 ofWarp(uint32 value) {
    uint32 result;
    asm volatile("redux.sync.or.b32 %0, %1, 0xffffffff;" : "=r"(result) : "r"(value));
    return result;
}

// gridDim.x read anew: kept in a register across a main loop it would be spilled.
__device__ __forceinline__ int blockCount() {
    int count;
    asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(count));
    return count;
}

template <int kRegisters>
__device__ __forceinline__ void giveRegisters() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void takeRegisters() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Products of 16-bit floats with A, 64 rows of weights, in registers: a0 to a3 as in halfMma16 for the 16 rows of every
// warp. D as above, fp32; without kKeep it starts from zero.
#define WG_L8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define WG_L16 WG_L8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define WG_F8(i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define WG_F32(i) WG_F8(i), WG_F8(i + 8), WG_F8(i + 16), WG_F8(i + 24)
template <int kDtype, int kColumns>
struct RegisterProduct;
#define WG_REGISTERS(dtype, type, columns, list, a, b, c, e, f, k, ...) \
    template <> \
    struct RegisterProduct<dtype, columns> { \
        template <bool kKeep = true> \
        __device__ static __forceinline__ void add(float* d, uint32 a0, uint32 a1, uint32 a2, uint32 a3, \
                                                   uint64 descB) { \
            asm volatile("{.reg .pred p; setp.ne.b32 p, %" #k ", 0;\nwgmma.mma_async.sync.aligned.m64n" #columns \
                         "k16.f32." type "." type " {" list "}, {%" #a ", %" #b ", %" #c ", %" #e "}, %" #f \
                         ", p, 1, 1, 0;\n}" \
                         : __VA_ARGS__ \
                         : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(descB), "n"(int(kKeep))); \
        } \
    };
#define WG_REGISTERS_BOTH(...) WG_REGISTERS(kFloat16, "f16", __VA_ARGS__) WG_REGISTERS(kBfloat16, "bf16", __VA_ARGS__)
WG_REGISTERS_BOTH(16, WG_L8, 8, 9, 10, 11, 12, 13, WG_F8(0))
WG_REGISTERS_BOTH(32, WG_L16, 16, 17, 18, 19, 20, 21, WG_F8(0), WG_F8(8))
WG_REGISTERS_BOTH(64, WG_L32, 32, 33, 34, 35, 36, 37, WG_F32(0))
WG_REGISTERS_BOTH(128, WG_L64, 64, 65, 66, 67, 68, 69, WG_F32(0), WG_F32(32))
WG_REGISTERS_BOTH(256, WG_L128, 128, 129, 130, 131, 132, 133, WG_F32(0), WG_F32(32), WG_F32(64), WG_F32(96))

// The same of unsigned bytes, sums in integers: a0 to a3 as in byteMma32.
template <int kColumns>
struct RegisterBytesProduct;
#define WG_REGISTER_BYTES(columns, list, a, b, c, e, f, k, ...) \
    template <> \
    struct RegisterBytesProduct<columns> { \
        __device__ static __forceinline__ void add(int* d, uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint64 descB) { \
            asm volatile("{.reg .pred p; setp.ne.b32 p, %" #k ", 0;\nwgmma.mma_async.sync.aligned.m64n" #columns \
                         "k32.s32.u8.u8 {" list "}, {%" #a ", %" #b ", %" #c ", %" #e "}, %" #f ", p;\n}" \
                         : __VA_ARGS__ \
                         : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(descB), "n"(1)); \
        } \
    };
WG_REGISTER_BYTES(32, WG_L16, 16, 17, 18, 19, 20, 21, WG_D8(0), WG_D8(8))
WG_REGISTER_BYTES(64, WG_L32, 32, 33, 34, 35, 36, 37, WG_D32)
WG_REGISTER_BYTES(128, WG_L64, 64, 65, 66, 67, 68, 69, WG_D64)
WG_REGISTER_BYTES(256, WG_L128, 128, 129, 130, 131, 132, 133, WG_D128)
