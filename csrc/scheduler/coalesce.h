// Coalescing: decode operations of one layer from several attention servers become one, so that
// each expert's weights are read once. Used by the controller alone; it keeps no shared word.
//
// An operation waits, by at most `window_ns`, for servers that are one layer behind it; and for the
// leader, the lowest-numbered server, wherever that is: so servers that run the same model drift
// into step by themselves and need no barrier. (Servers waiting for whoever is behind them can
// chase one another round the model for ever.) Nobody waits for a server that has sent nothing for
// `stale_ns`.
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

// Of the sources in `mask`, which is not 0, the one whose operation has waited longest; of several
// the lowest.
XP_HD uint32_t oldest(const Coalescer& c, uint64_t mask) {
  uint32_t first = lowest_bit(mask);
  for (uint64_t m = mask; m; m &= m - 1)
    if (c.arrived_ns[lowest_bit(m)] < c.arrived_ns[first]) first = lowest_bit(m);
  return first;
}

// Takes these sources' operations out, due or not.
XP_HD uint64_t take(Coalescer& c, uint64_t group) {
  c.pending &= ~group;
  return group;
}

// A source that is gone: nobody waits for it, and its pending operation is dropped.
XP_HD void forget(Coalescer& c, uint32_t source) {
  c.pending &= ~(uint64_t{1} << source);
  c.known &= ~(uint64_t{1} << source);
}

XP_HD uint64_t live(const Coalescer& c, uint64_t now_ns) {
  uint64_t mask = 0;
  for (uint64_t m = c.known; m; m &= m - 1) {
    const uint32_t source = lowest_bit(m);
    if (now_ns - c.arrived_ns[source] <= c.stale_ns) mask |= uint64_t{1} << source;
  }
  return mask;
}

// How long `source`, which is pending, waits for `other`, which is not in its group. Half as long
// for the leader as for one that is a layer behind: two that wait for each other still draw near.
XP_HD uint64_t patience(const Coalescer& c, uint32_t source, uint32_t other, bool leader) {
  const uint32_t ahead = (c.layer[source] + c.layers - c.layer[other]) % c.layers;
  return ahead == 1 ? c.window_ns : leader ? c.window_ns / 2 : 0;
}

// The next group to run: sources whose pending operations have one layer, oldest first, all of
// which are thereby no longer pending. 0: none is due before `due_ns` (which is ~0 when nothing is
// pending).
XP_HD uint64_t take_group(Coalescer& c, uint64_t now_ns, uint64_t& due_ns) {
  due_ns = ~uint64_t{0};
  uint64_t seen = 0;
  const uint64_t others = live(c, now_ns);
  for (uint64_t rest = c.pending; rest; rest = c.pending & ~seen) {
    const uint32_t first = oldest(c, rest);
    const uint32_t layer = c.layer[first];
    uint64_t group = 0;
    for (uint64_t m = c.pending; m; m &= m - 1)
      if (c.layer[lowest_bit(m)] == layer) group |= uint64_t{1} << lowest_bit(m);
    uint64_t wait = 0;
    for (uint64_t m = others & ~group; m; m &= m - 1) {
      const uint64_t w = patience(c, first, lowest_bit(m), lowest_bit(m) == lowest_bit(others));
      if (w > wait) wait = w;
    }
    const uint64_t due = c.arrived_ns[first] + wait;
    if (now_ns >= due) {
      due_ns = now_ns;
      return take(c, group);
    }
    if (due < due_ns) due_ns = due;
    seen |= group;
  }
  return 0;
}
}  // namespace expertplex
