// What the roles of a cluster share: shared memory, the ring of tiles, reporting and stopping.
#pragma once

#include "claim.cuh"
#include "scheduler/coalesce.h"

namespace expertplex::apk {

constexpr uint32_t kRing = 2;
constexpr uint32_t kTakers = kCluster * (kMathThreads / 32 + 2);

struct SharedMemory {
  GemmMemory gemm;
  TileMessage ring[kRing];
  Barrier ring_full[kRing], ring_empty[kRing];  // empty: the leader's, all takers of both CTAs
  Barrier output_full[2], output_empty[2];      // per warpgroup, one phase per tile
  Barrier claim_next;                           // one phase per tile: the leader may claim the next
  Claimer claimer;                              // the leader's
  StageCache known;
  Tally tally;                  // the leader's
  uint64_t deadline;            // %globaltimer, odd; 0 ends every wait of this CTA
  uint64_t tile_deadline;       // the same, for the leader's waits on its tiles
  Operation arriving;           // the controller's
  Coalescer coalescer;          // the same
  uint64_t waiting[kMaxSlots];  // the same: ready words of slots whose operation is not submitted
  Served served;                // the same
  uint32_t ended;               // 1: this CTA has received the stop message
  uint64_t began[kRing];
  uint32_t peer_finished;  // tiles the other CTA has finished, kept in the leader
};

struct RingPosition {
  uint32_t count = 0;  // tiles before this one
  __device__ __forceinline__ uint32_t slot() const { return count % kRing; }
  __device__ __forceinline__ uint32_t parity() const { return count / kRing & 1; }
  __device__ __forceinline__ void advance() { ++count; }
};

__device__ __forceinline__ bool is_gemm(uint32_t stage) {
  return stage == kStageGateUp || stage == kStageDown;
}

// The current message; a stop if the deadline has passed.
__device__ __forceinline__ TileMessage take(SharedMemory& sh, const RingPosition& at) {
  const bool ok = sh.ring_full[at.slot()].wait_cluster(at.parity(), &sh.deadline);
  TileMessage m = sh.ring[at.slot()];
  if (!__all_sync(~0u, ok)) m.tile.stage = kStop;
  return m;
}

__device__ __forceinline__ void abort_cluster(SharedMemory& sh) {
  for (uint32_t cta = 0; cta < kCluster; ++cta)
    asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(peer_addr(smem_addr(&sh.deadline), cta)),
                 "l"(0ull)
                 : "memory");
}

// One thread. Only the first report is kept.
__device__ __forceinline__ void report(const Launch& p, uint32_t reason, const Report& found) {
  Report& to = *p.report;
  if (atomicCAS_system(&to.taken, 0u, 1u) != 0) return;
  to.cluster = found.cluster;
  to.phase = found.phase;
  to.stage = found.stage;
  to.layer = found.layer;
  to.ticket = found.ticket;
  to.slot = found.slot;
  to.count = found.count;
  __threadfence_system();
  *static_cast<volatile uint32_t*>(&to.reason) = reason;
}

// One thread: an operation has ended, its results are visible to this GPU; tells who waits for it.
__device__ __forceinline__ void publish(const Launch& p, const Operation& op, uint64_t now) {
  const uint32_t identity = identity_of(op.user), first = template_of(op.user);
  if (p.slots && is_merged(op.user)) {
    const Members& g = p.members[first];
    for (uint32_t i = __ldcg(&g.count); i-- > 0;)  // the first last: then the list may change
      store_release_system(p.slots[__ldcg(&g.slot[i])].done, __ldcg(&g.seq[i]));
  } else if (p.slots)
    store_release_system(p.slots[first].done, identity);
  else if (p.times)
    store_release(p.times[identity].done, now);
}

// One warp: a check epoch, its words written by all lanes.
__device__ __forceinline__ void announce_all(State& s, uint64_t now) {
  const uint32_t lane = threadIdx.x % 32;
  Epoch e{};
  if (lane == 0) e = draw_epoch(s, now);
  e = {__shfl_sync(~0u, e.number, 0), __shfl_sync(~0u, e.stop, 0),
       __shfl_sync(~0u, e.decode_workers, 0)};
  announce_epoch(s, e, lane, 32);
  __syncwarp();
}

// One warp.
__device__ __forceinline__ void stop_workers(State& s, uint32_t how) {
  if (threadIdx.x % 32 == 0) raise(s.stop, how);
  __syncwarp();
  announce_all(s, global_ns());
  if (threadIdx.x % 32 == 0) wake(s);
}

}  // namespace expertplex::apk
