// Eq. (3), eq. (4), tile coordinates, templates and coalescing: the parts without shared words.
#include "scheduler/policy.h"

#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "check.h"
#include "scheduler/coalesce.h"
#include "scheduler/template.h"
#include "scheduler/tiles.h"

using namespace expertplex;

namespace {
std::mt19937 random_engine(7);
uint32_t below(uint32_t n) { return random_engine() % n; }

void test_sm_budget() {
  const Budget b{44, 120, 8, 2};  // the paper's machine has 132 SMs
  CHECK(sm_budget(b, 8) == 44, "at the expected load q' is q");
  CHECK(sm_budget(b, 4) == 22, "half the load, half the SMs");
  CHECK(sm_budget(b, 1) == 6, "5.5 SMs round up to whole clusters");
  CHECK(sm_budget(b, 0) == 2, "decode with work has a cluster");
  CHECK(sm_budget(b, 1000) == 120, "Q_max");
  CHECK(sm_budget({44, 121, 8, 2}, 1000) == 120, "Q_max in whole clusters");
  CHECK(sm_budget(b, 0xffffffffu) == 120, "no overflow");
  for (uint32_t x = 0; x < 64; ++x) {
    CHECK(sm_budget(b, x) <= sm_budget(b, x + 1), "more work never means fewer SMs");
    CHECK(sm_budget(b, x) % b.cluster == 0, "whole clusters");
  }
}

void test_locate() {
  for (int round = 0; round < 2000; ++round) {
    const uint32_t experts = 1 + below(9), n_blocks = 1 + below(6), raster = 1 + below(9);
    const uint32_t tile_m = 1 + below(4);
    std::vector<uint32_t> rows(experts), prefix(experts + 1);
    for (uint32_t& r : rows) r = below(3) ? below(20) : 0;
    const uint32_t x_moe = block_prefix(rows.data(), experts, tile_m, prefix.data());
    std::set<std::tuple<uint32_t, uint32_t, uint32_t>> seen;
    for (uint32_t t = 0; t < x_moe * n_blocks; ++t) {
      const TileCoord c = locate(t, n_blocks, prefix.data(), experts, raster);
      CHECK(c.expert < experts && c.n < n_blocks, "inside the matrix");
      CHECK(c.m * tile_m < rows[c.expert], "tiles have rows");
      CHECK(seen.emplace(c.expert, c.m, c.n).second, "each tile once");
    }
    uint32_t expected = 0;
    for (const uint32_t r : rows) expected += ceil_div(r, tile_m);
    CHECK(x_moe == expected, "eq. (3)");
  }
}

void test_instantiate() {
  const OpTemplate t{Layout::kContiguous,
                     128,
                     8,
                     5,
                     {{Kind::kScatter, 0, 16},
                      {Kind::kGateUp, 12, 0},
                      {Kind::kActivation, 1, 0},
                      {Kind::kDown, 24, 0},
                      {Kind::kGather, 0, 32}}};
  const Operation op = instantiate(t, 5, 3, 100, 10);
  CHECK(op.sources == 5 && op.layer == 3 && op.n_stages == 5, "copied");
  const uint32_t expected[] = {7, 120, 10, 240, 4};
  for (uint32_t s = 0; s < 5; ++s) CHECK(op.tiles[s] == expected[s], "stage %u", s);
}

Coalescer coalescer(uint64_t window) {
  Coalescer c{};
  c.window_ns = window;
  c.stale_ns = 1000000;
  c.layers = 10;
  return c;
}

void test_coalesce_cases() {
  uint64_t due;
  Coalescer c = coalescer(100);
  CHECK(take_group(c, 0, due) == 0 && due == ~uint64_t{0}, "nothing pending");
  arrive(c, 3, 5, 10);
  CHECK(take_group(c, 10, due) == 8, "nobody else is known: no wait");
  arrive(c, 1, 5, 20);
  CHECK(take_group(c, 20, due) == 2, "source 3 has had layer 5: no wait");
  arrive(c, 3, 6, 30);
  CHECK(take_group(c, 30, due) == 0 && due == 130, "source 1 is about to send layer 6");
  arrive(c, 1, 6, 60);
  CHECK(take_group(c, 60, due) == 10, "together");
  arrive(c, 3, 7, 100);
  CHECK(take_group(c, 199, due) == 0 && due == 200, "up to the window");
  CHECK(take_group(c, 200, due) == 8, "and no longer");
  arrive(c, 3, 8, 300);
  forget(c, 1);
  CHECK(take_group(c, 300, due) == 8, "a source that is gone is not waited for");
  arrive(c, 1, 9, 400);
  arrive(c, 3, 9, 400);
  CHECK(take_group(c, 400, due) == 10, "ready together");
  arrive(c, 1, 0, 500);
  CHECK(take_group(c, 500, due) == 0, "the last layer is right before the first");
  CHECK(take_group(c, 400 + c.stale_ns + 1, due) == 2, "a silent source is not waited for");
}

// Served by age, operations leave in the order in which they came, of either phase and layer; of
// those that came at the same time the lowest source first. None is left behind.
void test_oldest_is_fifo() {
  for (int round = 0; round < 2000; ++round) {
    Coalescer c = coalescer(100);
    std::vector<uint32_t> line;  // sources in order of arrival
    uint64_t now = 0;
    for (int step = 0; step < 200; ++step) {
      now += below(3);
      for (uint32_t s = 0; s < kMaxSources; ++s) {
        if (c.pending >> s & 1 || below(16)) continue;
        arrive(c, s, below(10), now);
        line.push_back(s);
      }
      ++now;  // what is found later is later
      if (line.empty() || below(2)) continue;
      const uint32_t first = oldest(c, c.pending);
      CHECK(first == line.front(), "source %u overtook source %u", first, line.front());
      take(c, uint64_t{1} << first);
      line.erase(line.begin());
    }
    CHECK(bit_count(c.pending) == line.size(), "an operation was lost");
  }
}

// Servers of about one pace, starting anywhere: no operation waits longer than the window, and they
// end up in step.
void test_coalesce_converges() {
  for (int round = 0; round < 200; ++round) {
    const uint64_t window = 40 + below(60), run = 40, pace = 100;
    const uint32_t sources = 2 + below(4), layers = 2 + below(11);
    Coalescer c = coalescer(window);
    c.layers = layers;
    std::vector<uint64_t> ready(sources), sent(sources);
    std::vector<uint32_t> layer(sources);
    std::vector<bool> waiting(sources);
    for (uint32_t s = 0; s < sources; ++s) ready[s] = below(2000), layer[s] = below(layers);
    uint64_t members = 0, groups = 0;
    for (uint64_t t = 0; t < 60000; ++t) {
      for (uint32_t s = 0; s < sources; ++s)
        if (!waiting[s] && t >= ready[s]) {
          arrive(c, s, layer[s], t);
          waiting[s] = true;
          sent[s] = t;
        }
      uint64_t due;
      while (const uint64_t group = take_group(c, t, due)) {
        const uint32_t together = layer[lowest_bit(group)];
        for (uint32_t s = 0; s < sources; ++s) {
          if (!(group >> s & 1)) continue;
          CHECK(t - sent[s] <= window, "waited %lu ns", static_cast<unsigned long>(t - sent[s]));
          CHECK(layer[s] == together, "one layer");
          layer[s] = (layer[s] + 1) % layers;
          ready[s] = t + run + pace + below(20);
          waiting[s] = false;
        }
        if (t > 50000) members += bit_count(group), ++groups;
      }
      CHECK(due > t, "due now, yet not taken");
    }
    CHECK(members == groups * sources, "not in step: %u sources, %lu operations in %lu groups",
          sources, static_cast<unsigned long>(members), static_cast<unsigned long>(groups));
  }
}
}  // namespace

int main() {
  test_sm_budget();
  test_locate();
  test_instantiate();
  test_coalesce_cases();
  test_coalesce_converges();
  test_oldest_is_fifo();
  std::printf("policy: ok\n");
}
