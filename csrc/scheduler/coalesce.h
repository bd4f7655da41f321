// Coalescing: decode operations of one layer from several attention servers become one, so that
// each expert's weights are read once. Used by the controller alone; it keeps no shared word.
//
// The server that is ahead waits, by at most `window_ns` per operation, for servers that are about
// to reach the same layer; one that is behind never waits. So servers that run the same model drift
// into step by themselves and need no barrier. A server that has sent nothing for `stale_ns` is not
// waited for.
#pragma once
#include "queue.h"

namespace expertplex {
struct Coalescer {
  uint64_t window_ns, stale_ns;
  uint32_t layers;                   // of the model: layer numbers are below it
  uint64_t pending;                  // bit s: source s has an operation that is waiting here
  uint64_t known;                    // bit s: source s has sent something
  uint32_t layer[kMaxSources];       // of the latest operation
  uint64_t arrived_ns[kMaxSources];  // of the latest operation
};

XP_HD void arrive(Coalescer& c, uint32_t source, uint32_t layer, uint64_t now_ns) {
  c.pending |= uint64_t{1} << source;
  c.known |= uint64_t{1} << source;
  c.layer[source] = layer;
  c.arrived_ns[source] = now_ns;
}

// A source that is gone: nobody waits for it, and its pending operation is dropped.
XP_HD void forget(Coalescer& c, uint32_t source) {
  c.pending &= ~(uint64_t{1} << source);
  c.known &= ~(uint64_t{1} << source);
}

// Should `source`, ready for `layer`, wait for `other`? It should when fewer layers (counted round
// the end of the model) separate `other` from it than it from `other`: exactly one of the two
// waits.
XP_HD bool waits_for(const Coalescer& c, uint32_t source, uint32_t other, uint64_t now_ns) {
  if (now_ns - c.arrived_ns[other] > c.stale_ns) return false;
  const bool pending = c.pending >> other & 1;
  const uint32_t ahead = (c.layer[source] + c.layers - c.layer[other]) % c.layers;
  if (pending && ahead == 0) return false;  // it is here
  const uint32_t to_come = ahead ? ahead : c.layers, round = c.layers + !pending;
  return 2 * to_come < round || (2 * to_come == round && source < other);
}

// The next group to run: sources whose pending operations have one layer, oldest first, all of
// which are thereby no longer pending. 0: none is due before `due_ns` (which is ~0 when nothing is
// pending).
XP_HD uint64_t take_group(Coalescer& c, uint64_t now_ns, uint64_t& due_ns) {
  due_ns = ~uint64_t{0};
  uint64_t seen = 0;
  for (uint64_t rest = c.pending; rest; rest = c.pending & ~seen) {
    uint32_t first = lowest_bit(rest);
    for (uint64_t m = rest; m; m &= m - 1)
      if (c.arrived_ns[lowest_bit(m)] < c.arrived_ns[first]) first = lowest_bit(m);
    const uint32_t layer = c.layer[first];
    uint64_t group = 0;
    bool wait = false;
    for (uint64_t m = c.known; m; m &= m - 1) {
      const uint32_t source = lowest_bit(m);
      if (c.pending >> source & 1 && c.layer[source] == layer) group |= uint64_t{1} << source;
      wait |= source != first && waits_for(c, first, source, now_ns);
    }
    const uint64_t due = c.arrived_ns[first] + c.window_ns;
    if (!wait || now_ns >= due) {
      c.pending &= ~group;
      due_ns = now_ns;
      return group;
    }
    if (due < due_ns) due_ns = due;
    seen |= group;
  }
  return 0;
}
}  // namespace expertplex
