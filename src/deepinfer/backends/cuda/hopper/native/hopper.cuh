// What the kernels share: barriers, matrix instructions (PTX ISA, wgmma), 16 bytes of shared memory, bits of bf16.

#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int GROUP = 128;  // threads that issue matrix instructions together

// Waits for the kernel before this one to end; then the next one may start, and come as far as its own wait. So what a
// kernel does before it must not write, nor read what the kernel before it wrote; those before that have ended.
__device__ inline void begin() {
    asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
}

// Where a place of shared memory lies, for instructions.
__device__ inline u32 shared(const void *at) { return (u32)__cvta_generic_to_shared(at); }

// ---- barriers, fences

__device__ inline void init(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ inline void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Makes a barrier wait for bytes of copies, and arrives.
__device__ inline void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Starts a copy to shared memory; places and bytes are multiples of 16.
__device__ inline void copy(u32 to, const void *from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// Starts a copy to the same place of all blocks of a cluster, told to the same barrier of each.
template <int CLUSTER> __device__ inline void copy_to_all(u32 to, const void *from, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
        ::"r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"((u16)((1 << CLUSTER) - 1)) : "memory");
}

__device__ inline void wait(u32 barrier, int parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(barrier), "r"(parity)
        : "memory");
}

// Makes this thread's stores to shared memory visible to the matrix unit.
__device__ inline void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ inline void warp_arrive(u32 barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(barrier);
}

// ---- copies of 16 bytes, a thread's own

__device__ inline void copy_line(u32 to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ inline void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until no more than LEFT groups of this thread's copies are on their way.
template <int LEFT> __device__ inline void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// ---- blocks of a cluster

__device__ inline u32 rank_in_cluster() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Waits for all threads of the cluster.
__device__ inline void meet() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Arrives at the barrier in this place of the block with this rank.
__device__ inline void arrive_at(u32 barrier, u32 rank) {
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier), "r"(rank) : "memory");
}

// A warp's, at the barriers in this place of all blocks.
template <int CLUSTER> __device__ inline void cluster_arrive(u32 barrier) {
    __syncwarp();
    if (threadIdx.x % 32 < CLUSTER) arrive_at(barrier, threadIdx.x % 32);
}

// ---- matrix instructions

__device__ inline void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ inline void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `LEFT` groups of committed products are under way.
template <int LEFT = 0>
__device__ inline void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Rows of 128 bytes, 16-byte pieces swizzled by the row; `panels`: bytes between stretches of 64 columns.
__device__ inline u64 matrix(u32 at, u32 panels) {
    return u64(at >> 4) | u64(panels >> 4) << 16 | u64(1024 >> 4) << 32 | 1ull << 62;
}

#define ACC8(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
    "+f"(d[i + 6]), "+f"(d[i + 7])
#define ACC32(d, i) ACC8(d, i), ACC8(d, i + 8), ACC8(d, i + 16), ACC8(d, i + 24)

__device__ inline void prefetch(const void *from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// ---- 16 bytes, and two bf16

struct Four {
    u32 a, b, c, d;
};

__device__ inline void store(u32 at, Four x) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(x.a), "r"(x.b), "r"(x.c), "r"(x.d) : "memory");
}

__device__ inline Four load(u32 at) {
    Four x;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(x.a), "=r"(x.b), "=r"(x.c), "=r"(x.d) : "r"(at));
    return x;
}

__device__ inline Four fetch(const void *at) {
    Four x;
    asm volatile("ld.global.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(x.a), "=r"(x.b), "=r"(x.c), "=r"(x.d) : "l"(at));
    return x;
}

__device__ inline void put(void *at, Four x) {
    asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(x.a), "r"(x.b), "r"(x.c), "r"(x.d) : "memory");
}

__device__ inline u32 two_bf16(float low, float high) {
    u32 z;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(z) : "f"(high), "f"(low));
    return z;
}

__device__ inline float low_half(u32 pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_half(u32 pair) { return __uint_as_float(pair & 0xFFFF0000); }
