// Blocks of a cluster that write into each other's shared memory. Without effect where the GPU has no clusters.
#pragma once
#include "common.cuh"
#include "mma.cuh"

constexpr bool kClusters = QK_CLUSTERS;

// Blocks of this block's cluster and its number in it; 1 and 0 without clusters. Read anew at every call, as that is
// cheaper than a register.
__device__ __forceinline__ uint32 clusterBlocks() {
    uint32 count = 1;
#if QK_CLUSTERS
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
#endif
    return count;
}
__device__ __forceinline__ uint32 clusterRank() {
    uint32 rank = 0;
#if QK_CLUSTERS
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return rank;
}

// In shared memory: counts what a block gets from others. One thread prepares it and, behind a barrier of the block, says
// how many bytes there will be; all threads arrive, and none of them sends before it has waited for the others of the
// cluster. A barrier of the cluster behind plain writes would do as well, but waits for all that its threads ever wrote,
// to global memory too.
struct Mailbox {
    uint64 received;

    __device__ __forceinline__ void prepare() {
#if QK_CLUSTERS
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(
                         sharedAddress(&received))
                     : "memory");
#endif
    }
    __device__ __forceinline__ void expect(uint32 bytes) {
#if QK_CLUSTERS
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(sharedAddress(&received)), "r"(bytes)
                     : "memory");
#endif
    }
    __device__ __forceinline__ void arrive() const {
#if QK_CLUSTERS
        asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
    }
    __device__ __forceinline__ void waitForOthers() const {
#if QK_CLUSTERS
        asm volatile("barrier.cluster.wait;" ::: "memory");
#endif
    }
    // Write to the shared memory of block `rank`, to whose mailbox too, at an address of this block's.
    __device__ __forceinline__ void send(uint32 shared, float value, uint32 rank) const {
#if QK_CLUSTERS
        asm volatile("{\n.reg .u32 place, count;\n"
                     "mapa.shared::cluster.u32 place, %0, %2;\nmapa.shared::cluster.u32 count, %1, %2;\n"
                     "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [place], %3, [count];\n}" ::"r"(shared),
                     "r"(sharedAddress(&received)), "r"(rank), "f"(value)
                     : "memory");
#endif
    }
    // The same of four values, to an address that is a multiple of 16.
    __device__ __forceinline__ void send(uint32 shared, const float* four, uint32 rank) const {
#if QK_CLUSTERS
        asm volatile("{\n.reg .u32 place, count;\n"
                     "mapa.shared::cluster.u32 place, %0, %2;\nmapa.shared::cluster.u32 count, %1, %2;\n"
                     "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [place], {%3, %4, %5, %6}, [count];\n}" ::
                         "r"(shared),
                     "r"(sharedAddress(&received)), "r"(rank), "f"(four[0]), "f"(four[1]), "f"(four[2]), "f"(four[3])
                     : "memory");
#endif
    }
    // Wait until all of the bytes are there.
    __device__ __forceinline__ void receive() const {
#if QK_CLUSTERS
        for (uint32 done = 0; !done;) {
            asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\n"
                         "selp.u32 %0, 1, 0, p;\n}" : "=r"(done) : "r"(sharedAddress(&received)) : "memory");
        }
#endif
    }
};

// All threads of all blocks of the cluster wait for each other; what they wrote before is visible behind it.
__device__ __forceinline__ void clusterSync() {
#if QK_CLUSTERS
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// The same without the promise about what was written, but for memory barriers that were made before.
__device__ __forceinline__ void meetCluster() {
#if QK_CLUSTERS
    asm volatile("fence.mbarrier_init.release.cluster;\nbarrier.cluster.arrive.relaxed.aligned;\n"
                 "barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// An arrival at the memory barrier of block `rank` at this address.
__device__ __forceinline__ void remoteArrive(uint32 barrier, uint32 rank) {
#if QK_CLUSTERS
    asm volatile("{.reg .u32 place;\nmapa.shared::cluster.u32 place, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [place];\n}" ::"r"(barrier), "r"(rank) : "memory");
#endif
}

// Two floats of block `rank` at an address of this block's shared memory.
__device__ __forceinline__ float2 loadRemote8(uint32 shared, uint32 rank) {
    float2 pair{};
#if QK_CLUSTERS
    asm volatile("{.reg .u32 place;\nmapa.shared::cluster.u32 place, %2, %3;\n"
                 "ld.shared::cluster.v2.f32 {%0, %1}, [place];\n}"
                 : "=f"(pair.x), "=f"(pair.y) : "r"(shared), "r"(rank) : "memory");
#endif
    return pair;
}
