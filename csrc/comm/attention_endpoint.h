// The attention side of the data path: dispatch (push), wait for done, combine (pull).
//
// Owns: which token rows go to which MoE server, and the weighted sum of what comes back.
// Must not know: what the MoE servers compute or when.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/region.h"
#include "comm/weighted_sum.h"

namespace expertplex {

// Where every routed expert lives.
struct Placement {
  std::vector<int32_t> server, slot;
};

class AttentionEndpoint {
 public:
  AttentionEndpoint(const std::vector<std::string>& slot_paths,
                    const std::vector<std::string>& board_paths, const Shape& shape,
                    Placement placement, int64_t spin_ns)
      : shape_(shape), placement_(std::move(placement)), spin_ns_(spin_ns) {
    if (slot_paths.size() != board_paths.size() || slot_paths.empty()) {
      throw std::invalid_argument("one slot and one board per MoE server");
    }
    for (int32_t server : placement_.server) {
      if (server < 0 || server >= static_cast<int32_t>(slot_paths.size())) {
        throw std::invalid_argument("an expert is placed on MoE server " + std::to_string(server) +
                                    " of " + std::to_string(slot_paths.size()));
      }
    }
    for (size_t i = 0; i < slot_paths.size(); ++i) {
      peers_.emplace_back(slot_paths[i], board_paths[i], shape);
    }
    rows_.resize(size_t{shape.max_tokens} * shape.topk);
    weights_.resize(rows_.size());
  }

  AttentionEndpoint(const AttentionEndpoint&) = delete;
  AttentionEndpoint& operator=(const AttentionEndpoint&) = delete;

  // Pushes `tokens` rows of `x` ([tokens, hidden], contiguous) with their experts to every MoE
  // server that holds one of them, then signals. `ids` and `weights` are [tokens, topk]; the
  // weights stay here, for the sum.
  // A MoE server that gets no row is not woken and not waited for.
  void dispatch(const char* x, const int32_t* ids, const float* weights, uint32_t tokens,
                uint32_t layer, uint32_t phase) {
    if (tokens > shape_.max_tokens) {
      throw std::invalid_argument(std::to_string(tokens) + " tokens in one step, but the slots " +
                                  "hold " + std::to_string(shape_.max_tokens) +
                                  " (max_num_batched_tokens)");
    }
    if (in_flight_) throw std::logic_error("dispatch before combine of the previous operation");
    if (lost_ >= 0) {
      throw std::logic_error("moe-" + std::to_string(lost_) + " did not finish an earlier " +
                             "operation and may still use its slot; restart the attention server");
    }
    const int64_t start = monotonic_ns();
    const size_t row = size_t{shape_.hidden} * shape_.item;
    const uint32_t topk = shape_.topk;
    std::copy_n(weights, size_t{tokens} * topk, weights_.begin());
    std::fill_n(rows_.begin(), size_t{tokens} * topk, nullptr);
    for (uint32_t t = 0; t < tokens; ++t) {
      for (uint32_t k = 0; k < topk; ++k) {
        const int32_t expert = ids[t * topk + k];
        // vLLM pads routing with -1, which is nobody's expert.
        if (expert < 0) continue;
        if (expert >= static_cast<int32_t>(placement_.server.size())) {
          drop();
          throw std::out_of_range("routed to expert " + std::to_string(expert) + " of " +
                                  std::to_string(placement_.server.size()));
        }
        Peer& peer = peers_[placement_.server[expert]];
        if (peer.tokens == 0 || peer.newest != t) {
          std::memcpy(peer.slot.x() + peer.tokens * row, x + t * row, row);
          std::fill_n(peer.slot.ids() + size_t{peer.tokens} * topk, topk, -1);
          peer.newest = t;
          ++peer.tokens;
        }
        const size_t at = size_t{peer.tokens - 1} * topk + k;
        peer.slot.ids()[at] = placement_.slot[expert];
        rows_[size_t{t} * topk + k] = peer.slot.out() + at * shape_.hidden;
      }
    }
    for (Peer& peer : peers_) {
      if (peer.tokens == 0) continue;
      SlotHeader& header = peer.slot.header();
      header.layer = layer;
      header.phase = phase;
      header.tokens = peer.tokens;
      header.tokens_sent.fetch_add(header.tokens, std::memory_order_relaxed);
      publish(header.ready, ++peer.sequence);
      ring(peer.board.board().bell);
    }
    tokens_ = tokens;
    in_flight_ = true;
    dispatch_ns_ = monotonic_ns() - start;
  }

  // Waits for every MoE server of the operation and writes the weighted sums of their rows to
  // `out` ([tokens, hidden] fp32). Returns -1, or the rank of the server that did not answer in
  // time or is marked failed. After that nothing more can be dispatched: a MoE server that is only
  // late would read and write the buffers of the next operation.
  int combine(float* out, int64_t timeout_ns) {
    if (!in_flight_) throw std::logic_error("combine without dispatch");
    const int64_t start = monotonic_ns();
    const int64_t deadline = start + timeout_ns;
    int missing = -1;
    for (size_t s = 0; s < peers_.size() && missing < 0; ++s) {
      Peer& peer = peers_[s];
      if (peer.tokens == 0) continue;
      SlotHeader& header = peer.slot.header();
      const uint32_t expected = peer.sequence;
      const auto over = [&](uint32_t word) {
        return word == expected || header.failed.load(std::memory_order_acquire) != 0;
      };
      await(header.done, over, spin_ns_, deadline);
      if (read(header.done) != expected) missing = static_cast<int>(s);
    }
    const int64_t waited = monotonic_ns();
    if (missing < 0) sum(out);
    account(waited - start, monotonic_ns() - waited);
    drop();
    lost_ = missing;
    return missing;
  }

  // What the last operation cost and carried, for tests and benchmarks.
  uint64_t operations() const { return operations_; }

 private:
  struct Peer {
    Peer(const std::string& slot_path, const std::string& board_path, const Shape& shape)
        : slot(slot_path, shape, false),
          board(board_path, false),
          sequence(read(slot.header().ready)) {}
    Slot slot;
    BoardMapping board;
    uint32_t sequence;
    uint32_t tokens = 0;  // of the operation in flight that were sent there ...
    uint32_t newest = 0;  // ... and the last of them, its index in the step
  };

  void sum(float* out) const {
    const size_t hidden = shape_.hidden;
    for (size_t t = 0; t < tokens_; ++t) {
      const size_t at = t * shape_.topk;
      weighted_sum(out + t * hidden, &rows_[at], &weights_[at], shape_.topk, hidden);
    }
  }

  void account(int64_t wait_ns, int64_t combine_ns) {
    ++operations_;
    SlotHeader& header = peers_.front().slot.header();
    header.operations.fetch_add(1, std::memory_order_relaxed);
    header.dispatch_ns.fetch_add(dispatch_ns_, std::memory_order_relaxed);
    header.wait_ns.fetch_add(wait_ns, std::memory_order_relaxed);
    header.combine_ns.fetch_add(combine_ns, std::memory_order_relaxed);
  }

  void drop() {
    for (Peer& peer : peers_) peer.tokens = 0;
    in_flight_ = false;
  }

  Shape shape_;
  Placement placement_;
  int64_t spin_ns_;
  std::vector<Peer> peers_;
  // Of the operation in flight, [tokens, topk]: where each row will be, in a slot, and its weight.
  std::vector<const float*> rows_;
  std::vector<float> weights_;
  uint32_t tokens_ = 0;
  bool in_flight_ = false;
  int lost_ = -1;  // the MoE server that did not finish an operation
  int64_t dispatch_ns_ = 0;
  uint64_t operations_ = 0;
};

}  // namespace expertplex
