// The scheduler under real threads, for ThreadSanitizer above all: results of one stage, written as
// plain memory, are read by the next; a missing release or acquire is a reported race.
// Usage: `threads_test [rounds]`.
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "scheduler/scheduler.h"

using namespace expertplex;

namespace {
constexpr uint32_t kWorkers = 4, kSources = 3, kOperations = 60, kWidth = 8;

struct Buffers {  // of one source in one phase; one operation in flight
  uint32_t cells[kMaxStages][kWidth] = {};
  uint64_t expected = 0;  // by the last stage
};

struct World {
  State s{};
  Buffers buffers[kPhases][kSources][kDepth];
  uint64_t done[kPhases][kSources] = {};  // done words, polled by the attention servers
};

uint64_t now() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

void run_tile(World& w, const Tile& tile) {
  const Slot& slot = w.s.queue[tile.phase].slot[tile.slot];
  Buffers& b = w.buffers[tile.phase][lowest_bit(slot.op.sources)][slot.op.user % kDepth];
  uint32_t sum = 1;  // every cell of the stages before
  for (uint32_t stage = 0; stage < tile.stage; ++stage)
    for (uint32_t t = 0; t < slot.op.tiles[stage]; ++t) sum += b.cells[stage][t];
  b.cells[tile.stage][tile.ticket] = sum;
}

void work(World& w, uint32_t index) {
  Worker worker;
  init(worker, index);
  while (true) {
    Tile tile;
    const Next next = claim(w.s, worker, now(), tile);
    if (next == Next::kStop) return;
    if (next != Next::kTile) {
      std::this_thread::yield();
      continue;
    }
    run_tile(w, tile);
    Operation op;
    if (finish(w.s, tile, op) == Finish::kDone)
      store_release(w.done[tile.phase][lowest_bit(op.sources)], op.user);
  }
}

// What the last stage's cells must be: each tile of stage k sees prod_{j<k} (1 + tiles[j]).
uint32_t last_cell(const Operation& op) {
  uint32_t sum = 1, cell = 0;
  for (uint32_t s = 0; s < op.n_stages; ++s) {
    if (op.tiles[s]) cell = sum;
    sum += op.tiles[s] * sum;
  }
  return cell;
}

void wait_done(const World& w, uint32_t phase, uint32_t source, uint64_t user) {
  while (load_acquire(w.done[phase][source]) != user) std::this_thread::yield();
}

void round(uint32_t seed) {
  auto w = std::make_unique<World>();
  std::mt19937 random(seed);
  init(w->s, {kWorkers, 1 + seed % 3, seed % 2 ? 0u : 20000u, {2, 3, 2, 1}});
  std::vector<std::thread> workers;
  for (uint32_t i = 0; i < kWorkers; ++i) workers.emplace_back(work, std::ref(*w), i);
  Operation in_flight[kPhases][kSources] = {};
  auto collect = [&](uint32_t phase, uint32_t source) {
    const Operation& op = in_flight[phase][source];
    if (!op.user) return;
    wait_done(*w, phase, source, op.user);
    uint32_t last = op.n_stages;
    while (last > 0 && op.tiles[last - 1] == 0) --last;
    const Buffers& b = w->buffers[phase][source][op.user % kDepth];
    for (uint32_t t = 0; t < op.tiles[last - 1]; ++t)
      CHECK(b.cells[last - 1][t] == last_cell(op), "a tile saw unfinished inputs");
  };
  for (uint64_t k = 1; k <= kOperations; ++k) {
    const uint32_t phase = random() % kPhases, source = random() % kSources;
    collect(phase, source);
    Operation op{};
    op.sources = uint64_t{1} << source;
    op.user = k;
    op.x_moe = 1 + random() % 3;
    op.n_stages = 1 + random() % 5;
    for (uint32_t s = 0; s < op.n_stages; ++s) op.tiles[s] = random() % kWidth;
    op.tiles[random() % op.n_stages] = 1;
    in_flight[phase][source] = op;
    CHECK(submit(w->s, phase, op, now(), now()) == Submit::kQueued, "slots are free");
    Overdue overdue;
    find_overdue(w->s, now(), overdue);
  }
  for (uint32_t phase = 0; phase < kPhases; ++phase)
    for (uint32_t source = 0; source < kSources; ++source)
      if (seed % 4) collect(phase, source);
  request_stop(w->s, seed % 2 ? kDrain : kAbort, now());
  for (std::thread& t : workers) t.join();
}
}  // namespace

int main(int argc, char** argv) {
  const uint32_t rounds = argc > 1 ? static_cast<uint32_t>(std::stoul(argv[1])) : 30;
  for (uint32_t k = 1; k <= rounds; ++k) {
    current_seed = k;
    round(k);
  }
  std::printf("threads: %u rounds of %u operations on %u workers\n", rounds, kOperations, kWorkers);
}
