// Host tests of the shared-memory path that need threads, sanitizers or a look inside a wait.
// Usage: comm_test DIRECTORY, where files of the run may be made.
//
// ThreadSanitizer sees one mapping at a time, so what it checks here is signals and the data they
// publish within one mapping; dispatch and combine between mappings are tested from Python.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/attention_endpoint.h"
#include "comm/moe_endpoint.h"

#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) {                                                              \
      std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                  \
    }                                                                                \
  } while (0)

using namespace expertplex;

namespace {

constexpr int64_t kSecond = 1'000'000'000;

int64_t in_seconds(int64_t seconds) { return monotonic_ns() + seconds * kSecond; }

// Two threads hand a plain value back and forth; each must see what the other wrote before it
// published, and no wake-up may be lost.
void ping_pong(int rounds, int64_t spin_ns) {
  Signal there{}, back{};
  int value = 0;
  std::thread other([&] {
    for (uint32_t i = 1; i <= static_cast<uint32_t>(rounds); ++i) {
      const auto arrived = [i](uint32_t word) { return word == i; };
      CHECK(await(there, arrived, spin_ns, in_seconds(30)));
      value = value * 3 + 1;
      publish(back, i);
    }
  });
  int expected = 0;
  for (uint32_t i = 1; i <= static_cast<uint32_t>(rounds); ++i) {
    value = static_cast<int>(i);
    publish(there, i);
    const auto answered = [i](uint32_t word) { return word == i; };
    CHECK(await(back, answered, spin_ns, in_seconds(30)));
    expected = static_cast<int>(i) * 3 + 1;
    CHECK(value == expected);
  }
  other.join();
  CHECK(there.sleepers.load() == 0 && back.sleepers.load() == 0);
}

// Several threads ring one bell; the waiter must not sleep through a ring.
void many_ringers(int ringers, int rounds) {
  Signal bell{};
  std::atomic<int> posted{0};
  std::vector<std::thread> threads;
  for (int r = 0; r < ringers; ++r) {
    threads.emplace_back([&] {
      for (int i = 0; i < rounds; ++i) {
        posted.fetch_add(1, std::memory_order_relaxed);
        ring(bell);
      }
    });
  }
  for (;;) {
    const uint32_t heard = read(bell);
    if (posted.load(std::memory_order_relaxed) == ringers * rounds) break;
    CHECK(await(bell, [heard](uint32_t word) { return word != heard; }, 0, in_seconds(30)));
  }
  for (std::thread& thread : threads) thread.join();
}

void deadline_passes() {
  Signal silent{};
  const auto never = [](uint32_t) { return false; };
  for (int64_t spin_ns : {int64_t{0}, int64_t{100'000'000}}) {
    const int64_t start = monotonic_ns();
    CHECK(!await(silent, never, spin_ns, start + 20'000'000));
    const int64_t took = monotonic_ns() - start;
    CHECK(took >= 20'000'000 && took < 5 * kSecond);
  }
}

// The failure comes after the waiter's last look and before its sleep.
void failure_between_look_and_sleep() {
  SlotHeader header{};
  int looks = 0;
  const int64_t start = monotonic_ns();
  const auto over = [&](uint32_t word) {
    const bool seen = word == 1 || header.failed.load(std::memory_order_acquire) != 0;
    if (++looks == 2) mark_failed(header);  // the first look is the one before announcing a sleep
    return seen;
  };
  CHECK(await(header.done, over, 0, start + 10 * kSecond));
  CHECK(monotonic_ns() - start < 5 * kSecond);
  CHECK(read(header.done) != 1);  // a failure must not read as the operation's end
}

// An operation that is late completes after its deadline: it must not pass for a later one.
void late_completion(const std::string& directory) {
  const Shape shape{4, 8, 2, 4};
  const std::string slot_path = directory + "/slot", board_path = directory + "/board";
  Slot slot(slot_path, shape, true);
  BoardMapping board(board_path, true);
  auto attention = std::make_unique<AttentionEndpoint>(
      std::vector{slot_path}, std::vector{board_path}, shape, Placement{{0, 0}, {0, 1}}, 0);
  MoeEndpoint moe({slot_path}, {shape}, board_path, 0);
  std::vector<float> x(4 * 8, 1.0f), weights(4 * 2, 1.0f), sum(4 * 8);
  const std::vector<int32_t> ids(4 * 2, 1);
  const auto dispatch = [&](uint32_t tokens) {
    attention->dispatch(reinterpret_cast<const char*>(x.data()), ids.data(), weights.data(), tokens,
                        0, 0);
  };
  dispatch(4);
  const std::vector<Operation> taken = moe.wait(kSecond);
  CHECK(taken.size() == 1 && taken[0].tokens == 4);
  CHECK(attention->combine(sum.data(), 1'000'000) == 0);
  // The slot's buffers may still be in use, so this endpoint is over ...
  bool refused = false;
  try {
    dispatch(1);
  } catch (const std::logic_error& error) {
    refused = std::string(error.what()).find("moe-0") != std::string::npos;
  }
  CHECK(refused);
  moe.complete(taken[0], 0);
  // ... and one that takes the slot over starts behind the late operation.
  attention = std::make_unique<AttentionEndpoint>(std::vector{slot_path}, std::vector{board_path},
                                                  shape, Placement{{0, 0}, {0, 1}}, 0);
  dispatch(2);
  CHECK(attention->combine(sum.data(), 1'000'000) == 0);
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc == 2);
  ping_pong(3'000, 0);
  ping_pong(3'000, 20'000);
  many_ringers(3, 2'000);
  deadline_passes();
  failure_between_look_and_sleep();
  late_completion(argv[1]);
  std::puts("comm_test: ok");
}
