// A check epoch on the device: telling every cluster whose turn it is.
#pragma once

#include "scheduler/scheduler.h"

namespace expertplex::apk {

// The scheduler's announce() by `lanes` threads, with one fence in all where raise() has one and
// two round trips per word. Words only grow, and what was written before is there before them.
__device__ __forceinline__ void announce_epoch(State& s, const Epoch& e, uint32_t lane,
                                               uint32_t lanes) {
  __threadfence();
  for (uint32_t i = lane; i < s.config.workers; i += lanes) {
    const uint64_t word = phase_word(e.number, e.stop, preferred_phase(i, e.decode_workers));
    asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(&s.p[i].value), "l"(word)
                 : "memory");
  }
}

// One thread, once an operation's x_moe is known. True: decode's share of the workers changes by
// it, which is to be announced.
__device__ __forceinline__ bool set_demand_changes(State& s, Slot& slot, uint32_t x_moe) {
  const uint32_t more = x_moe - slot.op.x_moe;
  if (more == 0) return false;
  slot.op.x_moe = x_moe;
  const Budget& b = s.config.budget;
  const uint32_t before = fetch_add(s.demand, more), after = before + more;
  return sm_budget(b, before ? before : b.x_star) != sm_budget(b, after ? after : b.x_star);
}

}  // namespace expertplex::apk
