// What scheduling one tile costs: claim and finish with nothing in between. Prints lines of
// `workers sources clock ns`: ns per tile and worker; clock: 1 where each claim reads the time. Run
// by benchmarks/scheduler_cost.py.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>

#include "scheduler/scheduler.h"

using namespace expertplex;

namespace {
uint64_t now_ns() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

void drain(State& s, uint32_t index, bool read_clock) {
  Worker worker;
  init(worker, index);
  Tile tile;
  Operation op;
  while (claim(s, worker, read_clock ? now_ns() : 0, tile) == Next::kTile) finish(s, tile, op);
}

// One prefill operation per source, all tiles in one stage.
double measure(uint32_t workers, uint32_t sources, bool read_clock) {
  constexpr uint32_t kTiles = 2'000'000;
  auto s = std::make_unique<State>();
  init(*s, {workers, 4, 0, {1, 1, 1, 1}});
  Operation op{};
  op.n_stages = 1;
  op.tiles[0] = kTiles / sources;
  for (uint32_t source = 0; source < sources; ++source) {
    op.sources = uint64_t{1} << source;
    submit(*s, kPrefill, op, 0, 0);
  }
  const uint64_t begin = now_ns();
  std::vector<std::thread> threads;
  for (uint32_t i = 1; i < workers; ++i) threads.emplace_back([&, i] { drain(*s, i, read_clock); });
  drain(*s, 0, read_clock);
  for (std::thread& t : threads) t.join();
  return static_cast<double>(now_ns() - begin) * workers / kTiles;
}
}  // namespace

int main() {
  for (const uint32_t workers : {1u, 2u})
    for (const uint32_t sources : {1u, 4u})
      for (const bool clock : {false, true}) {
        std::vector<double> runs;
        for (int k = 0; k < 7; ++k) runs.push_back(measure(workers, sources, clock));
        std::ranges::sort(runs);
        std::printf("%u %u %d %.2f\n", workers, sources, clock, runs[runs.size() / 2]);
      }
}
