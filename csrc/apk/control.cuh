// The roles that do not compute: the controller, which submits operations, and the watches, which
// speak with the host.
//
// A finite run submits a list of operations and ends. A resident run serves slots that attention
// servers write into, until it is told to stop. Both submit to the tile scheduler in the same way.
#pragma once

#include "serve.cuh"

namespace expertplex::apk {

constexpr uint64_t kTellNs = 1'000'000;  // between what the host is told of a cluster

// A finite run's controller: each operation of the list when it is due.
__device__ __forceinline__ void replay(SharedMemory& sh, const Launch& p, uint64_t start_ns) {
  const uint32_t lane = threadIdx.x % 32;
  State& s = *p.state;
  for (uint32_t next = 0; next < p.n_arrivals;) {
    const Arrival& arrival = p.arrivals[next];
    const uint64_t due = start_ns + arrival.at_ns;
    uint64_t now = global_ns();
    Operation& op = sh.arriving;  // read before it is due
    const auto* from = reinterpret_cast<const uint32_t*>(&arrival.op);
    if (lane < sizeof(Operation) / 4) reinterpret_cast<uint32_t*>(&op)[lane] = from[lane];
    __syncwarp();
    if (lane == 0 && op.n_stages == 0) set_stages(op);
    const uint64_t* earlier = arrival.after == ~0u ? nullptr : &p.times[arrival.after].done;
    while ((now < due || (earlier && load_acquire(*earlier) == 0)) &&
           load_relaxed(*p.request) == kRun)
      now = global_ns();
    if (load_relaxed(*p.request) != kRun) return;
    uint32_t queued = 0;
    if (lane == 0) {
      if (p.times) p.times[identity_of(op.user)].submitted = now;
      queued = enqueue(s, arrival.phase, op, ~0ull) == Submit::kQueued;
    }
    queued = __shfl_sync(~0u, queued, 0);
    if (!queued) continue;  // its source has two operations in flight
    ++next;
    tell_workers(s, arrival.phase, now);
  }
}

// Warp 11 of CTA 0: the controller. Nothing is submitted after the drain has been announced.
__device__ __forceinline__ void control(SharedMemory& sh, const Launch& p, uint64_t start_ns) {
  if (p.slots)
    serve(sh, p, gridDim.x / kCluster);
  else
    replay(sh, p, start_ns);
  stop_workers(*p.state, kDrain);
}

// The leader's counters to the host, read from its shared memory.
__device__ __forceinline__ void tell_tally(SharedMemory& sh, const Launch& p, uint32_t cluster) {
  constexpr uint32_t kCounters = sizeof(Counters) / 8;
  const uint32_t lane = threadIdx.x % 32;
  if (lane >= kTallyWords) return;
  const auto* counters = reinterpret_cast<const uint64_t*>(&sh.claimer.worker.counters);
  const auto* tally = reinterpret_cast<const uint64_t*>(&sh.tally);
  const uint64_t* at = lane < kCounters         ? counters + lane
                       : lane < kTallyWords - 1 ? tally + (lane - kCounters)
                                                : &sh.claimer.word;
  uint64_t value;
  asm volatile("ld.volatile.shared::cluster.u64 %0, [%1];"
               : "=l"(value)
               : "r"(peer_addr(smem_addr(at), 0)));
  *static_cast<volatile uint64_t*>(&p.tallies[cluster * kTallyStride + lane]) = value;
}

// Cluster 0's watch: the words the host shares, which take microseconds to read, and the time
// limit. `told`: what the controller has been asked for.
__device__ __forceinline__ void attend_host(SharedMemory& sh, const Launch& p, uint64_t now,
                                            uint32_t& told) {
  State& s = *p.state;
  *static_cast<volatile uint64_t*>(p.heartbeat) = now;
  uint32_t stop = *static_cast<const volatile uint32_t*>(p.stop);
  if (load_relaxed(s.stop) == kAbort) stop = kAbort;
  if (now >= *static_cast<volatile uint64_t*>(&sh.deadline)) {
    if (threadIdx.x % 32 == 0) report(p, kOutOfTime, {});
    stop = kAbort;
  }
  if (stop <= told) return;
  told = stop;
  if (threadIdx.x % 32 == 0) store_relaxed(*p.request, stop);
  if (stop == kAbort) stop_workers(s, kAbort);
}

// Warp 11 of every CTA 1.
__device__ __forceinline__ void watch(SharedMemory& sh, const Launch& p, uint32_t cluster) {
  uint32_t told = kRun;
  uint64_t tell_at = p.tallies ? global_ns() + kTellNs : ~uint64_t{0};
  while (atomicOr(&sh.ended, 0u) == 0) {
    const uint64_t now = global_ns();
    if (cluster == 0) attend_host(sh, p, now, told);
    if (now >= tell_at) {
      tell_at = now + kTellNs;
      tell_tally(sh, p, cluster);
    }
    __nanosleep(cluster == 0 ? 2000 : 20000);
  }
  // The cluster may have ended by an abort of its own, between two looks at the stop word.
  if (cluster == 0) attend_host(sh, p, global_ns(), told);
  if (p.tallies) tell_tally(sh, p, cluster);
}

}  // namespace expertplex::apk
