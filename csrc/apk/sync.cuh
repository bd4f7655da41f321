// Waits, memory ordering and the clock: everything the kernel's roles use to talk to one another.
//
// Every wait ends: at its barrier, or once the CTA's deadline word (shared memory) has passed. An
// abort is a deadline of zero, so one store releases all waits of a CTA. This file knows nothing
// about tiles.
#pragma once

#include <cstdint>
#include <cute/arch/util.hpp>

namespace expertplex::apk {

__device__ __forceinline__ uint64_t global_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// threadIdx.x, read anew: what is computed from it is not kept in registers across the GEMM's
// mainloop, which has none to spare.
__device__ __forceinline__ uint32_t thread_index() {
  uint32_t t;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
  return t;
}

__device__ __forceinline__ uint32_t smem_addr(const void* p) {
  return cute::cast_smem_ptr_to_uint(p);
}

__device__ __forceinline__ uint32_t peer_addr(uint32_t addr, uint32_t cta) {
  uint32_t r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(addr), "r"(cta));
  return r;
}

// A shared-memory mbarrier. Parity is the caller's: 0 for the first completion, 1 for the second,
// and so on.
struct Barrier {
  uint64_t state;

  __device__ __forceinline__ void init(uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_addr(this)), "r"(arrivals)
                 : "memory");
  }
  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_addr(this)) : "memory");
  }
  // Without .release.cluster, which would put a GPU-wide memory barrier before every arrival (and
  // halve the speed of the GEMM): what these arrivals hand back is only read, never written, by the
  // arriving thread.
  __device__ __forceinline__ void arrive_at(uint32_t cta) {
    asm volatile(
        "mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(peer_addr(smem_addr(this), cta))
        : "memory");
  }
  __device__ __forceinline__ void arrive_expect(uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_addr(this)),
                 "r"(bytes)
                 : "memory");
  }
  __device__ __forceinline__ void arrive_expect_at(uint32_t bytes, uint32_t cta) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(
                     peer_addr(smem_addr(this), cta)),
                 "r"(bytes)
                 : "memory");
  }
  // Arrives once all cp.async copies this thread has issued so far have landed.
  __device__ __forceinline__ void arrive_after_copies() {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_addr(this))
                 : "memory");
  }

  // The polling loops stay inside one asm block: a C++ loop with an exit in the math warps'
  // mainloop costs the compiler its register allocation at 64x192 accumulators.
  __device__ __forceinline__ bool wait(uint32_t parity, const uint64_t* deadline) {
    uint32_t ok;
    asm volatile(
        "{\n.reg .pred done, early;\n.reg .u64 now, limit;\n"
        "POLL: mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "@done bra END;\n"
        "mov.u64 now, %%globaltimer;\nld.volatile.shared.u64 limit, [%3];\n"
        "setp.lt.u64 early, now, limit;\n@early bra POLL;\n"
        "END: selp.u32 %0, 1, 0, done;\n}"
        : "=r"(ok)
        : "r"(smem_addr(this)), "r"(parity), "r"(smem_addr(deadline))
        : "memory");
    return ok != 0;
  }
  // For the mainloop, which has no cycle to spare: until its barrier or an abort (the low half of
  // the deadline, otherwise never zero), into which the leader's watch over its tiles turns a
  // deadline that has passed. The first try is outside the loop, so that ptxas can begin it long
  // before its outcome is needed, while the sums of the K block before are scaled.
  __device__ __forceinline__ void wait_or_abort(uint32_t parity, const uint64_t* deadline) {
    asm volatile(
        "{\n.reg .pred done, on;\n.reg .u32 limit;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra END;\n"
        "POLL: ld.volatile.shared.u32 limit, [%2];\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra END;\n"
        "setp.ne.u32 on, limit, 0;\n@on bra POLL;\n"
        "END:\n}" ::"r"(smem_addr(this)),
        "r"(parity), "r"(smem_addr(deadline))
        : "memory");
  }
  // The same, for what another CTA of the cluster wrote.
  __device__ __forceinline__ bool wait_cluster(uint32_t parity, const uint64_t* deadline) {
    uint32_t ok;
    asm volatile(
        "{\n.reg .pred done, early;\n.reg .u64 now, limit;\n"
        "POLL: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], %2;\n"
        "@done bra END;\n"
        "mov.u64 now, %%globaltimer;\nld.volatile.shared.u64 limit, [%3];\n"
        "setp.lt.u64 early, now, limit;\n@early bra POLL;\n"
        "END: selp.u32 %0, 1, 0, done;\n}"
        : "=r"(ok)
        : "r"(smem_addr(this)), "r"(parity), "r"(smem_addr(deadline))
        : "memory");
    return ok != 0;
  }
};

// 16 bytes into a CTA of the cluster, counted by that CTA's barrier.
__device__ __forceinline__ void store_async(uint32_t dst, uint32_t barrier, uint4 v) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(dst),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
      : "memory");
}

// Ordinary stores <-> TMA: both sides of a hand-over through global memory pass this fence.
__device__ __forceinline__ void fence_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Words shared with other GPUs: what is written before a release is there for whoever acquires it.
__device__ __forceinline__ uint64_t load_acquire_system(const uint64_t* word) {
  uint64_t v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(word) : "memory");
  return v;
}
__device__ __forceinline__ void store_release_system(uint64_t* word, uint64_t v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(v) : "memory");
}

template <uint32_t kThreads>
__device__ __forceinline__ void sync_threads(uint32_t id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(kThreads) : "memory");
}

}  // namespace expertplex::apk
