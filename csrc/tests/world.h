// A small scheduler run as fibers, with a monitor that watches every step and checks the
// invariants.
//
// Checked: each ticket runs once and after all tiles of the stages before it; a worker claims no
// tile of the phase it should leave while the phase it belongs to has some; nobody sleeps while
// there is something to claim; sources of a phase take turns; epochs never go back; an operation is
// done once, when all its tiles have run; stopping ends. With FIFO: no tile runs before all tiles
// of all operations submitted earlier.
#pragma once
#include <algorithm>
#include <array>
#include <string>

#include "check.h"
#include "fibers.h"
// fibers.h defines what the scheduler calls before each access to a shared word.
#include "scheduler/scheduler.h"

namespace world {
using namespace expertplex;

struct Script {  // what the controller does, in order
  enum Kind { kSubmit, kStop, kPause } kind;
  uint32_t phase = 0;
  Operation op{};
  StopRequest how = kRun;
  uint32_t steps = 0;  // kPause
};

inline Operation operation(uint64_t sources, std::initializer_list<uint32_t> tiles,
                           uint32_t x_moe = 1) {
  Operation op{};
  op.sources = sources;
  op.x_moe = x_moe;
  op.n_stages = static_cast<uint32_t>(tiles.size());
  std::copy(tiles.begin(), tiles.end(), op.tiles);
  return op;
}

struct Record {  // of one submitted operation
  Operation op;
  uint32_t phase;
  std::vector<std::vector<uint8_t>> claimed, ran;  // [stage][ticket]
  bool done = false;
};

struct Span {
  uint32_t min = 0, max = 0;
  void widen(uint32_t v) { min = std::min(min, v), max = std::max(max, v); }
  void widen(Span v) { widen(v.min), widen(v.max); }
};

struct Gate {  // what has been true all the time since a worker began to claim
  std::array<uint64_t, kPhases> claimable{};
  Span share;  // decode's share of the workers
  bool aborting = false;
};

struct Run {
  State s{};
  std::vector<Worker> workers;
  std::vector<Gate> gate;
  std::vector<std::array<std::array<uint32_t, 2>, kPhases>> streak;  // {source, tiles in a row}
  std::vector<uint64_t> epoch_seen, word_seen;
  std::vector<bool> claiming, asleep;
  std::vector<Record> records;
  std::vector<uint32_t>
      delays;  // extra steps that executing a tile takes, used in turn; empty: none
  uint64_t published[kPhases] = {0, 0};  // slots whose submission has returned
  uint32_t next_delay = 0, publishing = 0;
  bool announcing = false;  // an epoch is being started: workers see the old share or the new one
  Span announced, next;     // decode's share while the latest epoch was started; likewise the next
  uint64_t clock = 0;
  bool aborted = false;
  bool fifo = false;  // the controller submits when nothing is in flight
  int controller = 0;
};

inline uint64_t claimable(const Run& r, uint32_t phase) {
  uint64_t mask = 0;
  for (uint64_t busy = r.s.queue[phase].busy; busy; busy &= busy - 1) {
    const uint32_t i = lowest_bit(busy);
    const Ticket t = unpack(r.s.queue[phase].slot[i].ticket);
    if (t.next < t.limit) mask |= uint64_t{1} << i;
  }
  return mask;
}

// After every step: narrow down what each worker that is in claim() may rely on, and look for
// sleepers.
inline void observe(Run& r) {
  ++r.clock;
  const uint64_t now[kPhases] = {claimable(r, kDecode), claimable(r, kPrefill)};
  const uint32_t share = decode_workers(r.s);
  r.next.widen(share);
  for (uint32_t p = 0; p < kPhases; ++p) r.published[p] &= r.s.queue[p].busy;
  for (size_t i = 0; i < r.workers.size(); ++i) {
    CHECK(r.workers[i].epoch >= r.epoch_seen[i], "worker %zu went back in epochs", i);
    r.epoch_seen[i] = r.workers[i].epoch;
    CHECK(r.s.p[i].value >= r.word_seen[i], "p_%zu went back", i);
    r.word_seen[i] = r.s.p[i].value;
    if (r.claiming[i]) {
      for (uint32_t p = 0; p < kPhases; ++p) r.gate[i].claimable[p] &= now[p] & r.published[p];
      r.gate[i].share.widen(share);
      r.gate[i].share.widen(r.announced);
    }
    if (r.asleep[i] && !r.publishing && !r.aborted)
      CHECK(!fibers::all[i].ready || fibers::all[i].ready() || !(now[0] | now[1]),
            "worker %zu sleeps while tiles can be claimed", i);
  }
}

inline void claimed(Run& r, uint32_t i, const Tile& tile) {
  const Slot& slot = r.s.queue[tile.phase].slot[tile.slot];
  Record& record = r.records[slot.op.user];
  CHECK(!record.done, "a tile of a finished operation was claimed");
  CHECK(tile.stage < record.op.n_stages && tile.ticket < record.op.tiles[tile.stage],
        "no such tile");
  for (uint32_t stage = 0; stage < tile.stage; ++stage)
    for (const uint8_t ran : record.ran[stage]) CHECK(ran, "claimed before its inputs were ready");
  for (uint64_t earlier = 0; r.fifo && earlier < slot.op.user; ++earlier)
    for (const auto& stage : r.records[earlier].ran)
      for (const uint8_t ran : stage) CHECK(ran, "operation %lu was overtaken", earlier);
  CHECK(!record.claimed[tile.stage][tile.ticket]++, "ticket %u of stage %u claimed twice",
        tile.ticket, tile.stage);
  CHECK((tile.epoch & 0xffffffffu) == (r.workers[i].epoch & 0xffffffffu), "tile has another epoch");
  const Gate& gate = r.gate[i];
  CHECK(!gate.aborting, "claimed after an abort");
  CHECK(!(tile.phase == kPrefill && gate.claimable[kDecode] && i < gate.share.min),
        "worker %u took a prefill tile past urgent decode tiles", i);
  CHECK(!(tile.phase == kDecode && gate.claimable[kPrefill] && i >= gate.share.max),
        "worker %u took a decode tile past prefill's share", i);
  auto& [source, length] = r.streak[i][tile.phase];  // counted while another source had tiles
  const uint32_t from = tile.slot / kDepth;
  const bool contended =
      gate.claimable[tile.phase] & ~(((uint64_t{1} << kDepth) - 1) << from * kDepth);
  length = !contended ? 0 : from == source ? length + 1 : 1;
  source = from;
  CHECK(length <= r.s.config.quantum, "worker %u took %u tiles in a row from source %u", i, length,
        from);
}

inline uint64_t locals(const Run& r, uint32_t i) {
  const Worker& w = r.workers[i];
  uint64_t h = fibers::mix(w.epoch << 8 | w.last_phase, w.tile_epoch);
  for (uint32_t p = 0; p < kPhases; ++p) {
    h = fibers::mix(h, uint64_t{w.cursor[p].source} << 32 | w.cursor[p].taken);
    h = fibers::mix(h, uint64_t{r.streak[i][p][0]} << 32 | r.streak[i][p][1]);
  }
  return h;
}

inline void work(Run& r, uint32_t i) {
  Worker& w = r.workers[i];
  while (true) {
    fibers::forget(locals(r, i));
    const uint32_t seen = load_acquire(r.s.work);
    r.gate[i] = {{claimable(r, 0) & r.published[0], claimable(r, 1) & r.published[1]},
                 r.announced,
                 r.aborted};
    r.gate[i].share.widen(decode_workers(r.s));
    if (r.announcing) r.gate[i].share.widen(r.next);
    r.claiming[i] = true;
    Tile tile{};
    const Next next = claim(r.s, w, r.clock, tile);
    if (next == Next::kTile) claimed(r, i, tile);
    r.claiming[i] = false;
    r.gate[i] = {};
    if (next == Next::kStop) {
      CHECK(r.s.stop == kAbort || !(r.s.queue[kDecode].busy | r.s.queue[kPrefill].busy),
            "worker %u left while operations were in flight", i);
      return;
    }
    if (next == Next::kHold) {
      fibers::pause();
      continue;
    }
    if (next == Next::kIdle) {
      r.asleep[i] = true;
      fibers::wait_until([&r, seen] { return r.s.work != seen; });
      r.asleep[i] = false;
      continue;
    }
    Record& record = r.records[r.s.queue[tile.phase].slot[tile.slot].op.user];
    const uint32_t delay = r.delays.empty() ? 0 : r.delays[r.next_delay++ % r.delays.size()];
    fibers::forget(fibers::mix(locals(r, i), uint64_t{tile.ticket} << 32 | tile.phase << 16 |
                                                 tile.slot << 8 | tile.stage));
    for (uint32_t k = 0; k < delay; ++k) fibers::pause();
    record.ran[tile.stage][tile.ticket] = 1;
    ++r.publishing;
    Operation op{};
    const Finish result = finish(r.s, tile, op);
    --r.publishing;
    if (result == Finish::kDone) {
      CHECK(op.user == static_cast<uint64_t>(&record - r.records.data()),
            "another operation was done");
      CHECK(op.sources == record.op.sources, "sources were lost");
      CHECK(!record.done, "done twice");
      for (const auto& stage : record.ran)
        for (const uint8_t ran : stage) CHECK(ran, "done before a tile had run");
      record.done = true;
    }
  }
}

inline void begin_announcing(Run& r) {
  r.announcing = true;
  r.next = {decode_workers(r.s), decode_workers(r.s)};
}
inline void end_announcing(Run& r) {
  r.announcing = false;
  r.announced = r.next;
}

inline void control(Run& r, const std::vector<Script>& script) {
  for (const Script& step : script) {
    fibers::forget(static_cast<uint64_t>(&step - script.data()));
    if (step.kind == Script::kPause) {
      for (uint32_t k = 0; k < step.steps; ++k) fibers::pause();
    } else if (step.kind == Script::kStop) {
      begin_announcing(r);
      request_stop(r.s, step.how, r.clock);
      end_announcing(r);
      r.aborted |= step.how == kAbort;
    } else {
      Record record{step.op, step.phase, {}, {}, false};
      record.op.user = r.records.size();
      for (uint32_t s = 0; s < step.op.n_stages; ++s) {
        record.claimed.emplace_back(step.op.tiles[s]);
        record.ran.emplace_back(step.op.tiles[s]);
      }
      const Operation op = record.op;
      r.records.push_back(std::move(record));
      const uint32_t base = lowest_bit(op.sources) * kDepth;
      const uint64_t own = ((uint64_t{1} << kDepth) - 1) << base;
      while (r.fifo && in_flight(r.s))
        fibers::wait_until([&r] { return !(r.s.queue[kDecode].busy | r.s.queue[kPrefill].busy); });
      while (true) {
        if (step.phase == kDecode) begin_announcing(r);
        ++r.publishing;
        const Submit result = submit(r.s, step.phase, op, r.clock, r.clock + 1);
        --r.publishing;
        if (step.phase == kDecode && result == Submit::kQueued) end_announcing(r);
        r.announcing = false;
        if (result == Submit::kNothingToDo) r.records[op.user].done = true;
        if (result != Submit::kFull) break;
        fibers::wait_until([&r, &step, own] { return (r.s.queue[step.phase].busy & own) != own; });
      }
      r.published[step.phase] |= r.s.queue[step.phase].busy;
    }
  }
}

inline void start(Run& r, const Config& config, const std::vector<Script>& script) {
  init(r.s, config);
  r.announced = {config.workers, config.workers};
  r.workers.resize(config.workers);
  r.gate.resize(config.workers);
  r.streak.resize(config.workers);
  r.epoch_seen.resize(config.workers);
  r.word_seen.resize(config.workers);
  r.claiming.resize(config.workers);
  r.asleep.resize(config.workers);
  r.records.reserve(script.size());
  std::vector<std::function<void()>> bodies;
  for (uint32_t i = 0; i < config.workers; ++i) {
    init(r.workers[i], i);
    bodies.push_back([&r, i] { work(r, i); });
  }
  bodies.push_back([&r, &script] { control(r, script); });
  r.controller = static_cast<int>(config.workers);
  fibers::start(std::move(bodies));
}

inline void check_end(const Run& r) {
  for (const Record& record : r.records) {
    for (uint32_t s = 0; s < record.op.n_stages; ++s)
      for (size_t t = 0; t < record.claimed[s].size(); ++t) {
        CHECK(record.claimed[s][t] == record.ran[s][t], "a claimed tile never finished");
        CHECK(record.claimed[s][t] || r.aborted, "a tile was lost");
      }
    CHECK(record.done || r.aborted, "an operation was not done");
  }
}
}  // namespace world
