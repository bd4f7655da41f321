// The tile scheduler: two queues, workers, and the words between them. One worker is one CTA
// cluster on a GPU, one thread on a CPU. ExpertPlex section 4: bounded preemption at tile
// boundaries, work conservation.
//
// One controller submits. Every worker loops: claim -> execute -> finish. Under contention decode
// has workers [0, decode_workers) by eq. (4); a worker whose phase has no tile to claim takes the
// other's at once. Preemption: an urgent submission starts a check epoch and writes each worker's
// phase word p_i. A worker reads only its p_i, once per claim, so at most the tile it was executing
// belongs to the old phase.
#pragma once
#include "policy.h"
#include "queue.h"

namespace expertplex {
constexpr uint32_t kMaxWorkers = 256;

// Drain: finish what is queued, then end. Abort: end at the next tile boundary.
enum StopRequest : uint32_t { kRun, kDrain, kAbort };

struct Config {
  uint32_t workers;
  uint32_t quantum;  // tiles a worker takes from one source before it looks at the next
  // How long a decode worker stays idle while the last tiles of a decode stage run elsewhere,
  // instead of starting a prefill tile that the next stage would have to wait for. 0: strictly
  // work-conserving.
  uint64_t hold_ns;
  Budget budget;
};

struct alignas(128) PhaseWord {
  uint64_t value;  // shared: p_i = {epoch:48 | stop:8 | preferred phase:8}
};
XP_HD uint64_t phase_word(uint64_t epoch, uint32_t stop, uint32_t phase) {
  return epoch << 16 | stop << 8 | phase;
}

struct State {
  Config config;
  // Shared: changes whenever there may be something new to claim, or to stop for.
  alignas(128) uint32_t work;
  alignas(128) uint64_t epoch;  // shared: number of check epochs started
  uint64_t urgent_ns;           // shared: when the latest one started
  uint32_t demand;              // shared: x_moe of all decode operations in flight
  uint32_t stop;                // shared: StopRequest; workers see it in p_i
  PhaseWord p[kMaxWorkers];
  Queue queue[kPhases];
};

struct Counters {  // one writer each; read with load_relaxed
  uint64_t tiles[kPhases];
  uint64_t preemptions;  // check epochs that took this worker from prefill to decode
  uint64_t preempt_ns;   // from the urgent word to the end of the old-phase tile, in all
  uint64_t preempt_max_ns;
  uint64_t holds;  // times it stayed idle between two stages of decode
};

struct alignas(128) Worker {
  uint32_t index;
  uint32_t last_phase;  // of the tile before this claim; kPhases after idling
  uint64_t epoch;       // latest observed, never goes back
  uint64_t tile_epoch;  // in which the tile before was claimed
  uint64_t hold_until;  // 0: not holding
  Cursor cursor[kPhases];
  Counters counters;
};

XP_HD void init(State& s, const Config& config) {  // of zeroed memory, before any worker starts
  s.config = config;
  for (uint32_t i = 0; i < config.workers; ++i) s.p[i].value = phase_word(0, kRun, kDecode);
}
XP_HD void init(Worker& w, uint32_t index) {
  w = Worker{};
  w.index = index;
  w.last_phase = kPhases;
  for (Cursor& c : w.cursor)
    c.source = index % kMaxSources;  // spread: neighbours begin at different sources
}

// q' in workers for the decode operations now in flight; while their x_moe is unknown (0) it is
// taken as expected.
XP_HD uint32_t decode_workers(const State& s) {
  const Budget& b = s.config.budget;
  const uint32_t demand = load_relaxed(s.demand);
  const uint32_t clusters = sm_budget(b, demand ? demand : b.x_star) / b.cluster;
  return clusters < s.config.workers ? clusters : s.config.workers;
}

XP_HD void wake(State& s) { fetch_add(s.work, 1u); }

// A check epoch: decode is urgent, its share of the workers has changed, or the workers are to
// stop. It is drawn before the words are read that it announces, so the latest epoch always tells
// the latest state.
struct Epoch {
  uint64_t number;
  uint32_t stop, decode_workers;
};
XP_HD Epoch draw_epoch(State& s, uint64_t now_ns) {
  store_relaxed(s.urgent_ns, now_ns);
  const uint64_t number = fetch_add(s.epoch, uint64_t{1}) + 1;
  return {number, load_relaxed(s.stop), decode_workers(s)};
}
// Writes p_i of every `lanes`-th worker: a warp shares the work, a host thread is lane 0 of 1.
XP_HD void announce(State& s, const Epoch& e, uint32_t lane = 0, uint32_t lanes = 1) {
  for (uint32_t i = lane; i < s.config.workers; i += lanes)
    raise(s.p[i].value, phase_word(e.number, e.stop, preferred_phase(i, e.decode_workers)));
}

// The first half of a submission: tiles can be claimed, but nobody has been told.
XP_HD Submit enqueue(State& s, uint32_t phase, const Operation& op, uint64_t deadline_ns) {
  const bool demands = phase == kDecode && op.x_moe != 0;  // a device learns it later
  if (demands) fetch_add(s.demand, op.x_moe);
  const Submit result = submit(s.queue[phase], op, deadline_ns);
  if (demands && result != Submit::kQueued) fetch_add(s.demand, 0u - op.x_moe);
  return result;
}

// Has anything submitted not ended? A controller that submits only when nothing is in flight serves
// in order of arrival (FIFO), one operation after the other as kernels in a stream would be:
// nothing is preempted, because there is nothing to preempt.
XP_HD bool in_flight(const State& s) {
  return (load_acquire(s.queue[kDecode].busy) | load_acquire(s.queue[kPrefill].busy)) != 0;
}

// Tiles first, then the urgent word, then the wake-up: whoever sees one of them finds the former.
XP_HD Submit submit(State& s, uint32_t phase, const Operation& op, uint64_t now_ns,
                    uint64_t deadline_ns) {
  const Submit result = enqueue(s, phase, op, deadline_ns);
  if (result != Submit::kQueued) return result;
  if (phase == kDecode) announce(s, draw_epoch(s, now_ns));
  wake(s);
  return result;
}

// For a device that learns x_moe in its scatter stage; call it from the tile that also calls
// set_tiles.
XP_HD void set_demand(State& s, Slot& slot, uint32_t x_moe, uint64_t now_ns) {
  fetch_add(s.demand, x_moe - slot.op.x_moe);
  slot.op.x_moe = x_moe;
  announce(s, draw_epoch(s, now_ns));
}

XP_HD void note_claim(Worker& w, uint32_t phase, uint64_t now_ns, uint64_t urgent_ns) {
  if (phase == kDecode && w.last_phase == kPrefill && w.epoch != w.tile_epoch) {
    const uint64_t took = now_ns > urgent_ns ? now_ns - urgent_ns : 0,
                   max = w.counters.preempt_max_ns;
    count(w.counters.preemptions, 1);
    count(w.counters.preempt_ns, took);
    count(w.counters.preempt_max_ns, took > max ? took - max : 0);
  }
  w.last_phase = phase;
  w.tile_epoch = w.epoch;
  w.hold_until = 0;
  count(w.counters.tiles[phase], 1);
}

// May the worker stay idle a little longer, for a decode stage that is about to open?
XP_HD bool hold(Worker& w, uint64_t hold_ns, uint64_t now_ns) {
  if (hold_ns == 0) return false;
  if (w.hold_until == 0) {
    w.hold_until = now_ns + hold_ns;
    count(w.counters.holds, 1);
  }
  return now_ns < w.hold_until;
}

enum class Next {
  kTile,  // execute it, then finish()
  kHold,  // nothing yet: a decode stage is about to end; ask again soon
  kIdle,  // nothing: wait until `work` differs from what it was before the call
  kStop,
};

// The worker has read `work` before the call, so a wake-up between the two is not lost.
XP_HD Next claim(State& s, Worker& w, uint64_t now_ns, Tile& tile) {
  const uint64_t word =
      load_acquire(s.p[w.index].value);  // p_i: the only word it reads about phases and stopping
  const uint32_t stop = static_cast<uint32_t>(word >> 8 & 0xffu),
                 preferred = static_cast<uint32_t>(word & 0xffu);
  if (stop == kAbort) return Next::kStop;
  w.epoch = word >> 16;
  for (uint32_t k = 0; k < kPhases; ++k) {
    const uint32_t phase = (preferred + k) % kPhases;
    const Claim got = claim(s.queue[phase], w.cursor[phase], s.config.quantum, tile);
    if (got == Claim::kTile) {
      tile.phase = static_cast<uint8_t>(phase);
      tile.epoch = static_cast<uint32_t>(w.epoch);
      note_claim(w, phase, now_ns, load_relaxed(s.urgent_ns));
      return Next::kTile;
    }
    if (phase == kDecode && preferred == kDecode && got == Claim::kBetweenStages &&
        hold(w, s.config.hold_ns, now_ns))
      return Next::kHold;
  }
  w.last_phase = kPhases;
  if (stop == kDrain && !in_flight(s)) return Next::kStop;
  return Next::kIdle;
}

// On kDone the caller publishes the done word of every source in op.sources.
XP_HD Finish finish(State& s, const Tile& tile, Operation& op) {
  const Finish result = finish(s.queue[tile.phase], tile, op);
  if (result == Finish::kRunning) return result;
  if (result == Finish::kDone && tile.phase == kDecode) fetch_add(s.demand, 0u - op.x_moe);
  wake(s);
  return result;
}

// Nothing may be submitted afterwards.
XP_HD void request_stop(State& s, StopRequest how, uint64_t now_ns) {
  raise(s.stop, static_cast<uint32_t>(how));
  announce(s, draw_epoch(s, now_ns));
  wake(s);
}

// For the controller: the first operation past its deadline, to be named in an error. Returns false
// if there is none.
struct Overdue {
  uint32_t phase, slot, layer, stage, tiles, claimed, unfinished;
  uint64_t sources;
};
XP_HD bool find_overdue(const State& s, uint64_t now_ns, Overdue& out) {
  for (uint32_t phase = 0; phase < kPhases; ++phase) {
    const Queue& q = s.queue[phase];
    for (uint64_t busy = load_acquire(q.busy); busy; busy &= busy - 1) {
      const uint32_t i = lowest_bit(busy);
      if (q.slot[i].deadline_ns > now_ns) continue;
      const Ticket t = unpack(load_relaxed(q.slot[i].ticket));
      out = {phase,
             i,
             q.slot[i].op.layer,
             t.stage,
             t.limit,
             t.next < t.limit ? t.next : t.limit,
             load_relaxed(q.slot[i].unfinished),
             q.slot[i].op.sources};
      return true;
    }
  }
  return false;
}
}  // namespace expertplex
