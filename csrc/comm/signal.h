// A signal in shared memory: a 32-bit sequence word that one side advances and another waits for.
//
// Owns: memory ordering of signals, the bounded spin, sleeping and waking (Linux futex), deadlines.
// Must not know: what a signal means.
//
// The ringer makes a system call only if somebody sleeps; the waiter sleeps in the kernel, so an
// idle process costs nothing. Words live in memory that several processes map, so every futex
// operation is the shared kind.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>

namespace expertplex {

struct alignas(64) Signal {
  std::atomic<uint32_t> sequence;
  std::atomic<uint32_t> sleepers;
};
static_assert(std::atomic<uint32_t>::is_always_lock_free, "signals are shared between processes");

inline int64_t monotonic_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

inline void wake(Signal& signal) {
  // Pairs with the fence in `await`: either the waiter sees the new word or we see the sleeper.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (signal.sleepers.load(std::memory_order_relaxed) != 0) {
    syscall(SYS_futex, &signal.sequence, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }
}

// Makes everything written before it visible to whoever sees the new value.
inline void publish(Signal& signal, uint32_t value) {
  signal.sequence.store(value, std::memory_order_release);
  wake(signal);
}

inline void ring(Signal& signal) {
  signal.sequence.fetch_add(1, std::memory_order_release);
  wake(signal);
}

inline uint32_t read(const Signal& signal) {
  return signal.sequence.load(std::memory_order_acquire);
}

inline void relax_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until `ready(word)` holds; spins `spin_ns`, then sleeps. False when `deadline_ns` passed.
template <class Ready>
bool await(Signal& signal, Ready ready, int64_t spin_ns, int64_t deadline_ns) {
  uint32_t seen = read(signal);
  if (ready(seen)) return true;
  if (spin_ns > 0) {
    const int64_t spin_end = std::min(monotonic_ns() + spin_ns, deadline_ns);
    do {
      for (int i = 0; i < 64; ++i) {
        relax_cpu();
        seen = read(signal);
        if (ready(seen)) return true;
      }
    } while (monotonic_ns() < spin_end);
  }
  signal.sleepers.fetch_add(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  bool done = false;
  for (;;) {
    seen = read(signal);
    if ((done = ready(seen))) break;
    const int64_t left = deadline_ns - monotonic_ns();
    if (left <= 0) break;
    const timespec timeout{left / 1'000'000'000, left % 1'000'000'000};
    syscall(SYS_futex, &signal.sequence, FUTEX_WAIT, seen, &timeout, nullptr, 0);
  }
  signal.sleepers.fetch_sub(1, std::memory_order_relaxed);
  return done;
}

}  // namespace expertplex
