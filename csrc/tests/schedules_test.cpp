// Many random schedules of random work: usage `schedules_test [schedules] [first seed]`. A failure
// prints its seed.
#include <random>

#include "world.h"

using namespace world;

namespace {
struct Random {
  std::mt19937 engine;
  uint32_t below(uint32_t n) { return static_cast<uint32_t>(engine() % n); }
};

std::vector<Script> random_script(Random& random) {
  std::vector<Script> script;
  const uint32_t operations = 1 + random.below(6);
  for (uint32_t k = 0; k < operations; ++k) {
    if (random.below(2)) script.push_back({.kind = Script::kPause, .steps = random.below(60)});
    const uint32_t phase = random.below(2);
    Operation op = operation(uint64_t{1} << random.below(3), {}, 1 + random.below(4));
    if (random.below(4) == 0) op.sources |= uint64_t{1} << 3;  // coalesced with a fourth source
    op.layer = k;
    op.n_stages = 1 + random.below(5);
    for (uint32_t s = 0; s < op.n_stages; ++s) op.tiles[s] = random.below(phase == kDecode ? 4 : 7);
    script.push_back({.kind = Script::kSubmit, .phase = phase, .op = op});
  }
  if (random.below(2)) script.push_back({.kind = Script::kPause, .steps = random.below(100)});
  script.push_back({.kind = Script::kStop, .how = random.below(4) ? kDrain : kAbort});
  return script;
}

void run_one(uint32_t seed) {
  Random random{std::mt19937(seed)};
  const uint32_t workers = 1 + random.below(4);
  const Config config{
      workers,
      1 + random.below(3),
      random.below(3) ? 0 : random.below(40),
      {1 + random.below(workers), 1 + random.below(workers), 1 + random.below(4), 1}};
  const std::vector<Script> script = random_script(random);
  auto r = std::make_unique<Run>();
  r->fifo = random.below(4) == 0;
  for (uint32_t k = 0; k < 7; ++k)
    r->delays.push_back(random.below(3) ? random.below(3) : random.below(50));
  start(*r, config, script);
  // Some fibers are slow in most schedules: a uniform choice would rarely leave one far behind.
  std::vector<uint32_t> weight;
  for (uint32_t i = 0; i <= workers; ++i)
    weight.push_back(random.below(2) ? 16 : 1 + random.below(16));
  for (uint32_t steps = 0;; ++steps) {
    CHECK(steps < 200000, "did not end: seed %u", seed);
    std::vector<int> choices;
    bool all_done = true;
    for (int i = 0; i <= r->controller; ++i) {
      all_done &= fibers::all[i].done;
      if (fibers::runnable(i)) choices.insert(choices.end(), weight[i], i);
    }
    if (all_done) break;
    CHECK(!choices.empty(), "everybody waits: seed %u", seed);
    fibers::step(choices[random.below(static_cast<uint32_t>(choices.size()))]);
    observe(*r);
  }
  check_end(*r);
}
}  // namespace

int main(int argc, char** argv) {
  const uint32_t schedules = argc > 1 ? static_cast<uint32_t>(std::stoul(argv[1])) : 10000;
  const uint32_t first = argc > 2 ? static_cast<uint32_t>(std::stoul(argv[2])) : 1;
  for (uint32_t k = 0; k < schedules; ++k) {
    current_seed = first + k;
    run_one(first + k);
  }
  std::printf("schedules: %u, seeds from %u\n", schedules, first);
}
