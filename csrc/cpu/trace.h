// What the workers did, kept in memory until somebody writes it to a file: the latest events of
// each worker, without locks between them.
#pragma once
#include <cstdint>
#include <vector>

namespace expertplex::cpu {
struct Event {  // a tile
  uint64_t start_ns, end_ns;
  uint32_t ticket, sources, layer;
  uint8_t phase, stage;
};

class Track {  // one worker's; read only after it has ended
 public:
  void reserve(size_t most) { events_.reserve(most_ = most); }
  void add(Event e, uint64_t end_ns) {
    if (most_ == 0) return;
    e.end_ns = end_ns;
    if (events_.size() < most_)
      events_.push_back(e);
    else
      events_[oldest_++ % most_] = e;
    ++seen_;
  }
  const std::vector<Event>& events() const { return events_; }
  uint64_t lost() const { return seen_ - events_.size(); }

 private:
  std::vector<Event> events_;
  size_t most_ = 0, oldest_ = 0;
  uint64_t seen_ = 0;
};
}  // namespace expertplex::cpu
