// Who serves which phase: eq. (4) and the order in which a worker looks at the phases. Pure
// functions.
#pragma once
#include "platform.h"

namespace expertplex {
// Phases are small integers, most urgent first. Only kDecode preempts today.
constexpr uint32_t kDecode = 0, kPrefill = 1, kPhases = 2;

// Units of `q`, `q_max`: SMs (on a CPU, threads). `cluster`: SMs that one worker stands for.
struct Budget {
  uint32_t q;       // decode's offline budget, at the expected load
  uint32_t q_max;   // never more than this under contention, so that prefill goes on
  uint32_t x_star;  // x_moe* of eq. (4): the expected number of (expert, row block) pairs of a
                    // decode operation
  uint32_t cluster;
};

// Eq. (4), ExpertPlex section 6: q' = min(Q_max, ceil_c(q * x_moe / x_moe*)), in SMs. Q_max is
// rounded down to whole clusters, and decode that has work gets at least one cluster.
XP_HD uint32_t sm_budget(const Budget& b, uint32_t x_moe) {
  const uint64_t scaled = static_cast<uint64_t>(b.q) * x_moe,
                 unit = static_cast<uint64_t>(b.x_star) * b.cluster;
  const uint64_t clusters = (scaled + unit - 1) / unit, most = b.q_max / b.cluster;
  const uint64_t granted = clusters < most ? clusters : most;
  return static_cast<uint32_t>(granted ? granted : 1) * b.cluster;
}

// Under contention workers [0, decode_workers) put decode first and the others prefill.
XP_HD uint32_t preferred_phase(uint32_t worker, uint32_t decode_workers) {
  return worker < decode_workers ? kDecode : kPrefill;
}
}  // namespace expertplex
