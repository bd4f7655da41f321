// A resident run's controller: makes operations of ready words.
//
// Decode operations pass through the coalescer: those of one layer that are ready together, or
// within its window, run as one and read each expert's weights once. With FIFO all operations wait
// there for their turn. All of this is one warp's.
#pragma once

#include "cluster.cuh"

namespace expertplex::apk {

constexpr uint64_t kCheckNs =
    1'000'000;  // between looks for what is overdue, and words to the host

struct ReadyWord {
  uint64_t word;
  __device__ uint32_t seq() const { return word >> 32; }
  __device__ uint32_t phase() const { return word >> 31 & 1; }
  __device__ uint32_t layer() const { return word >> 20 & 0x7ff; }
  __device__ uint32_t tokens() const { return word & 0xfffff; }
};
static_assert(kPrefill == 1 && kDecode == 0, "the ready word's phase bit");

// The whole controller warp, after one or more operations have been put into a phase's queue. Idle
// clusters need no check epoch to find them, and an epoch takes microseconds.
__device__ __forceinline__ void tell_workers(State& s, uint32_t phase, uint64_t now) {
  if (threadIdx.x % 32 == 0) wake(s);
  if (phase == kDecode) announce_all(s, now);
  if (phase == kDecode && threadIdx.x % 32 == 0) wake(s);
  __syncwarp();
}

// What follows is one thread's, lane 0 of the controller.

// One that cannot be served is left undone: only the attention server that wrote it waits in vain.
__device__ __forceinline__ void refuse(const Launch& p, uint32_t slot, const ReadyWord& w) {
  report(p, kNotAnOperation,
         {.phase = w.phase(), .layer = w.layer(), .slot = slot, .count = w.tokens()});
}

// Is there anything to compute? If not, the word has been answered.
__device__ __forceinline__ bool accept(const Launch& p, uint32_t slot, const ReadyWord& w) {
  if (w.layer() >= p.n_layers || w.tokens() > p.slots[slot].max_tokens) {
    refuse(p, slot, w);
    return false;
  }
  if (w.tokens() == 0) store_release_system(p.slots[slot].done, w.seq());
  return w.tokens() != 0;
}

__device__ __forceinline__ void submit_as_one(SharedMemory& sh, const Launch& p, uint64_t group,
                                              uint32_t tokens, uint64_t now) {
  const uint32_t first = lowest_bit(group), count = bit_count(group);
  const ReadyWord w{sh.waiting[first]};
  Operation& op = sh.arriving;
  op.sources = 0;
  for (uint64_t m = group; m; m &= m - 1)
    op.sources |= uint64_t{1} << p.slots[lowest_bit(m)].source;
  op.user = handle(first, count > 1, w.phase() == kPrefill, tokens, w.seq());
  op.layer = w.layer();
  op.x_moe = 0;  // until counted
  set_stages(op);
  sh.served.operations[w.phase()] += count;
  sh.served.tokens[w.phase()] += tokens;
  sh.served.coalesced += count - 1;
  const uint64_t deadline = p.operation_ns ? now + p.operation_ns : ~uint64_t{0};
  if (enqueue(*p.state, w.phase(), op, deadline) == Submit::kQueued) return;
  for (uint64_t m = group; m; m &= m - 1)  // an operation before has not ended
    refuse(p, lowest_bit(m), {sh.waiting[lowest_bit(m)]});
}

// As one if the buffers of the first have room for all, else as several.
__device__ __forceinline__ void submit_group(SharedMemory& sh, const Launch& p, uint64_t group,
                                             uint64_t now) {
  while (group) {
    const uint32_t first = lowest_bit(group), room = p.slots[first].max_tokens;
    Members& g = p.members[first];
    uint32_t tokens = 0, count = 0;
    uint64_t taken = 0;
    for (uint64_t m = group; m; m &= m - 1) {
      const uint32_t slot = lowest_bit(m);
      const ReadyWord w{sh.waiting[slot]};
      if (tokens + w.tokens() > room) continue;
      g.first[count] = tokens;
      g.slot[count] = slot;
      g.seq[count++] = w.seq();
      tokens += w.tokens();
      taken |= uint64_t{1} << slot;
    }
    g.count = count;
    submit_as_one(sh, p, taken, tokens, now);
    group &= ~taken;
  }
}

// What waits in the coalescer and is due, which is 0 if nothing is. `all`: whether due or not.
__device__ __forceinline__ uint64_t next_group(SharedMemory& sh, const Launch& p, uint64_t now,
                                               bool all) {
  Coalescer& c = sh.coalescer;
  uint64_t due;
  if (!p.fifo)
    if (const uint64_t group = take_group(c, now, due)) return group;
  if (!c.pending || !(all || (p.fifo && !in_flight(*p.state)))) return 0;
  return take(c, uint64_t{1} << oldest(c, c.pending));
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

// The whole controller warp; lane i has slot i.
__device__ __forceinline__ void serve(SharedMemory& sh, const Launch& p, uint32_t clusters) {
  const uint32_t lane = threadIdx.x % 32;
  ServedSlot* mine = lane < p.n_slots ? p.slots + lane : nullptr;
  const uint64_t* ready = mine ? mine->ready : nullptr;
  uint32_t seen = mine ? mine->seen : 0;
  if (lane == 0) {
    sh.coalescer = Coalescer{};
    sh.coalescer.window_ns = p.window_ns;
    sh.coalescer.stale_ns = p.stale_ns;
    sh.coalescer.layers = p.n_layers;
    sh.served = Served{};
  }
  __syncwarp();
  for (uint64_t check_at = 0;;) {
    const uint32_t request = load_relaxed(*p.request);
    const ReadyWord w{mine ? load_acquire_system(ready) : uint64_t{seen} << 32};
    const uint64_t now = global_ns();
    const bool fresh = w.seq() != seen && request == kRun;
    const uint32_t decode = __ballot_sync(~0u, fresh && w.phase() == kDecode),
                   prefill = __ballot_sync(~0u, fresh && w.phase() == kPrefill);
    const uint32_t waiting = p.fifo         ? decode | prefill
                             : p.coalescing ? decode
                                            : 0,
                   direct = (decode | prefill) & ~waiting;
    if (fresh) {
      sh.waiting[lane] = w.word;
      mine->seen = seen = w.seq();
    }
    __syncwarp();
    if (waiting || sh.coalescer.pending) {
      uint32_t any = 0;
      if (lane == 0) {
        for (uint32_t m = waiting; m; m &= m - 1) {
          const uint32_t slot = lowest_bit(m);
          const ReadyWord its{sh.waiting[slot]};
          if (accept(p, slot, its)) arrive(sh.coalescer, slot, its.layer(), now);
        }
        while (const uint64_t group = next_group(sh, p, now, request != kRun)) {
          submit_group(sh, p, group, now);
          any = 1;
        }
      }
      if (__shfl_sync(~0u, any, 0)) tell_workers(*p.state, p.fifo ? kPrefill : kDecode, now);
    }
    if (direct) {
      for (uint32_t m = direct; lane == 0 && m; m &= m - 1) {
        const uint32_t slot = lowest_bit(m);
        const ReadyWord its{sh.waiting[slot]};
        if (accept(p, slot, its)) submit_as_one(sh, p, uint64_t{1} << slot, its.tokens(), now);
      }
      __syncwarp();
      tell_workers(*p.state, direct & decode ? kDecode : kPrefill, now);
    }
    if (now >= check_at || request != kRun) {
      check_at = now + kCheckNs;
      if (lane == 0 && p.operation_ns) check_overdue(p, now);
      if (lane < sizeof(Served) / 8)
        static_cast<volatile uint64_t*>(p.tallies)[clusters * kTallyStride + lane] =
            reinterpret_cast<const uint64_t*>(&sh.served)[lane];
      __syncwarp();
    }
    if (request != kRun) return;
  }
}

}  // namespace expertplex::apk
