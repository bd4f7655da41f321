// The roles that do not compute: the controller, which submits operations, and the watches, which
// speak with the host.
//
// A finite run submits a list of operations and ends. A resident run serves slots that attention
// servers write into, until it is told to stop. Both submit to the tile scheduler in the same way.
#pragma once

#include "cluster.cuh"

namespace expertplex::apk {

constexpr uint64_t kCheckNs = 1'000'000;  // between looks for operations that are overdue
constexpr uint64_t kTellNs = 1'000'000;   // between what the host is told of a cluster

// The whole controller warp, after one or more operations have been put into a phase's queue.
__device__ __forceinline__ void tell_workers(State& s, uint32_t phase, uint64_t now) {
  if (phase == kDecode) announce_all(s, now);
  if (threadIdx.x % 32 == 0) wake(s);
  __syncwarp();
}

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

// One thread: what a slot's ready word says, into the queue. One that cannot be served is reported
// and left undone: only the attention server that wrote it waits in vain.
__device__ __forceinline__ void submit_ready(SharedMemory& sh, const Launch& p, uint32_t index,
                                             uint64_t word, uint32_t phase, uint64_t now) {
  const ServedSlot& slot = p.slots[index];
  const uint32_t layer = word >> 20 & 0x7ff, tokens = word & 0xfffff;
  Operation& op = sh.arriving;
  op.sources = uint64_t{1} << slot.source;
  op.user = handle(index, phase == kPrefill, tokens, word >> 32);
  op.layer = layer;
  op.x_moe = 0;  // until counted
  set_stages(op);
  Submit result = Submit::kFull;
  if (layer < p.n_layers && tokens <= slot.max_tokens)
    result = enqueue(*p.state, phase, op, p.operation_ns ? now + p.operation_ns : ~0ull);
  if (result == Submit::kNothingToDo) publish(p, op, now);
  if (result != Submit::kFull) return;
  report(p, kNotAnOperation, {.phase = phase, .layer = layer, .slot = index, .count = tokens});
}

__device__ __forceinline__ void check_overdue(const Launch& p, uint64_t now) {
  Overdue late;
  if (!find_overdue(*p.state, now, late)) return;
  report(p, kOverdue,
         {.phase = late.phase,
          .stage = late.stage,
          .layer = late.layer,
          .ticket = late.claimed,
          .slot = lowest_bit(late.sources),
          .count = late.unfinished});
  raise(p.state->stop, static_cast<uint32_t>(kAbort));  // watch() tells the others
}

// A resident run's controller: lane i has slot i.
__device__ __forceinline__ void serve(SharedMemory& sh, const Launch& p) {
  const uint32_t lane = threadIdx.x % 32;
  ServedSlot* mine = lane < p.n_slots ? p.slots + lane : nullptr;
  const uint64_t* ready = mine ? mine->ready : nullptr;
  uint32_t seen = mine ? mine->seen : 0;
  uint64_t check_at = 0;
  while (true) {
    const uint32_t request = load_relaxed(*p.request);
    const uint64_t word = mine ? load_acquire_system(ready) : uint64_t{seen} << 32;
    if (request != kRun) return;
    const uint64_t now = global_ns();
    for (uint32_t phase = 0; phase < kPhases; ++phase) {  // the most urgent first
      const bool fresh = word >> 32 != seen && (word >> 31 & 1) == phase;
      const uint32_t slots = __ballot_sync(~0u, fresh);
      if (slots == 0) continue;
      for (uint32_t rest = slots; rest; rest &= rest - 1) {
        const uint32_t index = lowest_bit(rest);
        const uint64_t its = __shfl_sync(~0u, word, index);
        if (lane == 0) submit_ready(sh, p, index, its, phase, now);
        __syncwarp();
      }
      tell_workers(*p.state, phase, now);
      if (fresh) mine->seen = seen = word >> 32;
    }
    if (p.operation_ns && now >= check_at) {
      check_at = now + kCheckNs;
      if (lane == 0) check_overdue(p, now);
      __syncwarp();
    }
  }
}

// Warp 11 of CTA 0: the controller. Nothing is submitted after the drain has been announced.
__device__ __forceinline__ void control(SharedMemory& sh, const Launch& p, uint64_t start_ns) {
  if (p.slots)
    serve(sh, p);
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
  while (load_relaxed(sh.ended) == 0) {
    const uint64_t now = global_ns();
    if (cluster == 0) attend_host(sh, p, now, told);
    if (now >= tell_at) {
      tell_at = now + kTellNs;
      tell_tally(sh, p, cluster);
    }
    __nanosleep(cluster == 0 ? 2000 : 20000);
  }
  if (p.tallies) tell_tally(sh, p, cluster);
}

}  // namespace expertplex::apk
