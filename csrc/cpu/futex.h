// Sleeping on a shared word with a deadline: what std::atomic::wait lacks.
#pragma once
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <cstdint>
#include <ctime>

namespace expertplex::cpu {
// Returns when the word is woken, differs from `expected`, or `timeout_ns` has passed.
inline void futex_wait(const uint32_t& word, uint32_t expected, uint64_t timeout_ns) {
  const timespec timeout{static_cast<time_t>(timeout_ns / 1'000'000'000),
                         static_cast<long>(timeout_ns % 1'000'000'000)};
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, expected, &timeout, nullptr, 0);
}
inline void futex_wake(const uint32_t& word, uint32_t sleepers) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, sleepers > INT_MAX ? INT_MAX : sleepers, nullptr,
          nullptr, 0);
}
}  // namespace expertplex::cpu
