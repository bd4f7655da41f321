// The MoE side of the data path: notice ready operations, publish finished ones.
//
// Owns: which operation of which slot was already taken. It never starts communication: it reads
// its own memory and writes done words.
// Must not know: how an operation is computed.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/region.h"

namespace expertplex {

// One operation: a layer's tokens from one attention server.
struct Operation {
  uint32_t source, sequence, layer, phase, tokens;
};

class MoeEndpoint {
 public:
  MoeEndpoint(const std::vector<std::string>& slot_paths, const std::vector<Shape>& shapes,
              const std::string& board_path, int64_t spin_ns)
      : board_(board_path, false), spin_ns_(spin_ns) {
    if (slot_paths.size() != shapes.size()) throw std::invalid_argument("one shape per slot");
    for (size_t i = 0; i < slot_paths.size(); ++i) {
      slots_.emplace_back(slot_paths[i], shapes[i], false);
      taken_.push_back(read(slots_.back().header().done));
    }
    beat();
  }

  MoeEndpoint(const MoeEndpoint&) = delete;
  MoeEndpoint& operator=(const MoeEndpoint&) = delete;

  // Takes every operation that is ready; waits up to `timeout_ns` for the first. Empty on timeout
  // or stop.
  std::vector<Operation> wait(int64_t timeout_ns) {
    std::vector<Operation> ready;
    const int64_t deadline = monotonic_ns() + timeout_ns;
    Signal& bell = board_.board().bell;
    for (;;) {
      const uint32_t heard = read(bell);
      take(ready);
      beat();
      if (!ready.empty() || stopping() || monotonic_ns() >= deadline) return ready;
      await(bell, [&](uint32_t word) { return word != heard || stopping(); }, spin_ns_, deadline);
    }
  }

  // Publishes the done word of `op`; its rows must be in the slot's `out` buffer.
  void complete(const Operation& op, uint64_t busy_ns) {
    Board& board = board_.board();
    const uint32_t phase = op.phase != 0;
    board.operations[phase].fetch_add(1, std::memory_order_relaxed);
    board.tokens[phase].fetch_add(op.tokens, std::memory_order_relaxed);
    board.busy_ns[phase].fetch_add(busy_ns, std::memory_order_relaxed);
    publish(slots_.at(op.source).header().done, op.sequence);
    beat();
  }

  // Makes the backend's counters visible to the parent.
  void report(const std::vector<uint64_t>& counters) {
    if (counters.size() > kBackendCounters) {
      throw std::invalid_argument(std::to_string(counters.size()) + " counters, room for " +
                                  std::to_string(kBackendCounters));
    }
    for (size_t i = 0; i < counters.size(); ++i) {
      board_.board().backend[i].store(counters[i], std::memory_order_relaxed);
    }
  }

  bool stopping() const { return board_.board().stop.load(std::memory_order_acquire) != 0; }

  void beat() { board_.board().heartbeat_ns.store(monotonic_ns(), std::memory_order_relaxed); }

  const Slot& slot(size_t source) const { return slots_.at(source); }

 private:
  void take(std::vector<Operation>& ready) {
    for (size_t i = 0; i < slots_.size(); ++i) {
      SlotHeader& header = slots_[i].header();
      const uint32_t sequence = read(header.ready);
      if (sequence == taken_[i]) continue;
      taken_[i] = sequence;
      ready.push_back({static_cast<uint32_t>(i), sequence, header.layer, header.phase,
                       std::min(header.tokens, slots_[i].shape().max_tokens)});
    }
  }

  BoardMapping board_;
  std::vector<Slot> slots_;
  std::vector<uint32_t> taken_;
  int64_t spin_ns_;
};

}  // namespace expertplex
