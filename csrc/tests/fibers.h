// Cooperative threads for exploring interleavings of the real scheduler code: every access to a
// shared word hands control back, and the test decides which thread makes the next access.
// Sequentially consistent by construction; memory orders are ThreadSanitizer's business
// (threads_test.cpp).
#pragma once
#include <ucontext.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

namespace fibers {
inline uint64_t mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15ull;
  return hash ^ hash >> 29;
}

struct Fiber {
  ucontext_t context;
  std::function<void()> body;
  std::unique_ptr<char[]> stack;
  std::function<bool()> ready;  // set while the fiber waits for a condition
  uint64_t history = 0;  // what it has read since the last forget(): stands for its local variables
  bool done = false;
};

inline ucontext_t main_context;
inline std::vector<Fiber> all;
inline int running = -1;  // -1: the test itself, whose accesses are not interleaved

inline void give_way() {
  const int me = running;
  running = -1;
  swapcontext(&all[me].context, &main_context);
  running = me;
}

inline void pause() {  // a step that touches no shared word
  all[running].history = mix(all[running].history, 1);
  give_way();
}

// Before each access to a shared word: others may come first; then the value that the access will
// see is remembered.
inline void before_access(const void* word, size_t size) {
  if (running < 0) return;
  pause();
  uint64_t value = 0;
  std::memcpy(&value, word, size);
  all[running].history = mix(all[running].history, value);
}

inline void wait_until(std::function<bool()> condition) {
  all[running].ready = std::move(condition);
  give_way();
  all[running].ready = nullptr;
}

// At a point where the fiber's local variables are exactly those hashed into `locals`.
inline void forget(uint64_t locals) { all[running].history = locals; }

inline void entry(int index) {
  all[index].body();
  all[index].done = true;
  running = -1;
  setcontext(&main_context);
}

inline void start(std::vector<std::function<void()>> bodies) {
  constexpr size_t kStack = 64 << 10;
  static std::vector<std::unique_ptr<char[]>> stacks;  // kept between schedules
  while (stacks.size() < bodies.size()) stacks.push_back(std::make_unique<char[]>(kStack));
  all.clear();
  all.resize(bodies.size());
  for (size_t i = 0; i < bodies.size(); ++i) {
    Fiber& f = all[i];
    f.body = std::move(bodies[i]);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = stacks[i].get();
    f.context.uc_stack.ss_size = kStack;
    f.context.uc_link = &main_context;
    makecontext(&f.context, reinterpret_cast<void (*)()>(entry), 1, static_cast<int>(i));
  }
}

inline bool runnable(int i) { return !all[i].done && (!all[i].ready || all[i].ready()); }

inline void step(int i) {  // lets fiber i make its next access and run up to the one after it
  running = i;
  swapcontext(&main_context, &all[i].context);
  running = -1;
}
}  // namespace fibers

#define XP_ATOMIC_STEP(word) fibers::before_access(&(word), sizeof(word))
