// Every interleaving of small worlds with at most so many preemptions (a fiber is set aside though
// it could go on): depth-first over the choice of who makes the next access, cutting off at states
// seen before (shared words, what each fiber has read, the monitor's memory, preemptions spent).
// Usage: `exhaustive_test [preemptions more than usual]`.
#include <chrono>
#include <unordered_set>

#include "world.h"

using namespace world;

namespace {
struct World {
  const char* name;
  Config config;
  int bound;  // preemptions; kAny: every interleaving
  std::vector<Script> script;
};
constexpr int kAny = -1;

Script submission(uint32_t phase, uint32_t source, std::initializer_list<uint32_t> tiles) {
  return {.kind = Script::kSubmit,
          .phase = phase,
          .op = operation(uint64_t{1} << source, tiles),
          .how = kRun,
          .steps = 0};
}
Script stop(StopRequest how) {
  return {.kind = Script::kStop, .phase = 0, .op = {}, .how = how, .steps = 0};
}

uint64_t hash(const Run& r) {
  uint64_t h = fibers::mix(r.s.work, r.s.epoch);
  h = fibers::mix(h, uint64_t{r.s.demand} << 32 | r.s.stop);
  for (uint32_t p = 0; p < kPhases; ++p) {
    const Queue& q = r.s.queue[p];
    h = fibers::mix(fibers::mix(h, q.busy), r.published[p]);
    for (uint32_t i = 0; i < 2 * kDepth; ++i) {  // the worlds below use sources 0 and 1
      h = fibers::mix(h, q.slot[i].ticket);
      h = fibers::mix(h, uint64_t{q.slot[i].unfinished} << 32 | q.slot[i].op.user);
    }
  }
  for (size_t i = 0; i < r.workers.size(); ++i) {
    const Gate& g = r.gate[i];
    h = fibers::mix(h, r.s.p[i].value);
    h = fibers::mix(h, g.claimable[0]);
    h = fibers::mix(h, g.claimable[1]);
    h = fibers::mix(h, uint64_t{g.share.min} << 32 | g.share.max << 3 | g.aborting << 2 |
                           r.claiming[i] << 1 | r.asleep[i]);
  }
  h = fibers::mix(h, uint64_t{r.announced.min} << 32 | r.announced.max);
  h = fibers::mix(h, uint64_t{r.next.min} << 32 | r.next.max << 3 | r.announcing << 2 | r.aborted);
  for (const Record& record : r.records)
    for (size_t s = 0; s < record.claimed.size(); ++s)
      for (size_t t = 0; t < record.claimed[s].size(); ++t)
        h = fibers::mix(h, record.claimed[s][t] << 2 | record.ran[s][t] << 1 | record.done);
  for (const fibers::Fiber& f : fibers::all)
    h = fibers::mix(h, f.history << 2 | uint64_t{f.done} << 1 | (f.ready != nullptr));
  return h;
}

struct Choice {
  std::vector<int> options;  // the first costs nothing, the others a preemption if `contested`
  bool contested;
  size_t taken;
};

// Who may go next, the one that ran last first.
Choice choices(const Run& r, int last, bool may_preempt) {
  Choice here{{}, last >= 0 && fibers::runnable(last), 0};
  if (here.contested) here.options.push_back(last);
  for (int i = 0; i <= r.controller; ++i)
    if (i != last && fibers::runnable(i) && (may_preempt || !here.contested))
      here.options.push_back(i);
  return here;
}

// Returns the number of distinct states.
size_t explore(const World& w, int bound) {
  std::vector<Choice> path;
  std::unordered_set<uint64_t> seen;
  while (true) {
    auto r = std::make_unique<Run>();
    start(*r, w.config, w.script);
    int last = -1, spent = 0;
    for (size_t depth = 0;; ++depth) {
      if (depth == path.size()) {  // new ground
        const uint64_t key = bound < 0 ? hash(*r) : fibers::mix(hash(*r), last << 8 | spent);
        if (!seen.insert(key).second) break;
        if (std::ranges::all_of(fibers::all, &fibers::Fiber::done)) {
          check_end(*r);
          break;
        }
        path.push_back(choices(*r, last, bound < 0 || spent < bound));
        CHECK(!path.back().options.empty(), "everybody waits in '%s'", w.name);
        CHECK(depth < 10000, "'%s' does not end", w.name);
      }
      const Choice& choice = path[depth];
      last = choice.options[choice.taken];
      spent += choice.contested && choice.taken > 0;
      fibers::step(last);
      observe(*r);
      r->clock = 0;  // time is no part of these worlds
    }
    while (!path.empty() && path.back().taken + 1 == path.back().options.size()) path.pop_back();
    if (path.empty()) return seen.size();
    ++path.back().taken;
  }
}
}  // namespace

int main(int argc, char** argv) {
  const int more = argc > 1 ? std::stoi(argv[1]) : 0;
  const Config two{2, 1, 0, {1, 1, 1, 1}}, three{3, 1, 0, {2, 2, 1, 1}};
  const World worlds[] = {
      {"claim and abort", two, kAny, {submission(kPrefill, 0, {1}), stop(kAbort)}},
      {"two stages", two, 2, {submission(kPrefill, 0, {2, 1}), stop(kDrain)}},
      {"two sources",
       two,
       2,
       {submission(kPrefill, 0, {1}), submission(kPrefill, 1, {2}), stop(kDrain)}},
      {"preempt",
       two,
       2,
       {submission(kPrefill, 0, {2}), submission(kDecode, 0, {1}), stop(kDrain)}},
      {"preempt and abort",
       two,
       2,
       {submission(kPrefill, 0, {2}), submission(kDecode, 0, {1}), stop(kAbort)}},
      {"a slot used again",
       two,
       2,
       {submission(kDecode, 0, {1}), submission(kDecode, 0, {1}), submission(kDecode, 0, {1}),
        stop(kDrain)}},
      {"three workers", three, 1, {submission(kPrefill, 0, {2, 1}), stop(kDrain)}},
      {"three workers preempt",
       three,
       1,
       {submission(kPrefill, 0, {2}), submission(kDecode, 0, {1}), stop(kDrain)}},
  };
  for (const World& w : worlds) {
    const auto begin = std::chrono::steady_clock::now();
    const int bound = w.bound == kAny ? kAny : w.bound + more;
    const size_t states = explore(w, bound);
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    std::printf("%-20s preemptions: %-3s %9zu states, %.1f s\n", w.name,
                bound == kAny ? "any" : std::to_string(bound).c_str(), states, seconds);
    std::fflush(stdout);
  }
}
