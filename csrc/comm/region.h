// The shared-memory files of the one-sided data path and what lies where in them.
//
// A MoE server owns one *board* (doorbell, heartbeat, stop word, counters). Each attention server
// owns one *slot* on each MoE server (two, where its steps run as two microbatches): the buffers of
// the one operation it can have in flight there.
// Buffers are sized for the most tokens the attention server's scheduler can emit, so an operation
// always fits and nothing is ever resized, queued or credited.
//
// Must not know: phases' policies, models, who computes.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "comm/signal.h"

namespace expertplex {

constexpr uint32_t kMagic = 0x58504C58;  // "XLPX"
constexpr uint32_t kVersion = 3;
constexpr size_t kPage = 4096;
constexpr size_t kBackendCounters = 32;

// Shapes of one slot. `item` is the size in bytes of one activation element.
struct Shape {
  uint32_t max_tokens, hidden, topk, item;
  bool operator==(const Shape&) const = default;
};

struct SlotHeader {
  uint32_t magic, version;
  Shape shape;
  alignas(64) std::atomic<uint32_t> failed;  // set when this slot's MoE server is gone
  // Written by the attention server before `ready`.
  alignas(64) uint32_t layer, phase, tokens;
  Signal ready;  // attention server -> MoE server: the sequence number of the newest operation
  Signal done;   // MoE server -> attention server: the newest finished operation
  // Time inside remote MoE layers, ns, and how many; written by the attention server alone.
  alignas(64) std::atomic<uint64_t> operations, dispatch_ns, wait_ns, combine_ns, tokens_sent;
};
static_assert(sizeof(SlotHeader) <= kPage);

// Marks the slot's MoE server gone and wakes whoever waits for it.
inline void mark_failed(SlotHeader& header) {
  header.failed.store(1, std::memory_order_release);
  // A waiter may have looked at `failed` already and not sleep yet: the word it is about to sleep
  // on must change. Half the range away, it is no operation's number.
  header.done.sequence.fetch_add(1u << 31, std::memory_order_release);
  wake(header.done);
}

struct Board {
  uint32_t magic, version;
  alignas(64) std::atomic<uint32_t> stop;
  Signal bell;  // any attention server -> MoE server: look at your slots
  alignas(64) std::atomic<uint64_t> heartbeat_ns;  // CLOCK_MONOTONIC of the last sign of life
  alignas(64) std::atomic<uint64_t> operations[2], tokens[2], busy_ns[2];  // by phase
  // What the server's backend counts; the names of the values are the two sides' own business.
  alignas(64) std::atomic<uint64_t> backend[kBackendCounters];
};
static_assert(sizeof(Board) <= kPage);

// Byte offsets of a slot's buffers, each on its own page.
struct Offsets {
  size_t x, ids, out, size;

  explicit Offsets(const Shape& s) {
    size_t at = kPage;
    auto take = [&at](size_t bytes) {
      const size_t start = at;
      at = (at + bytes + kPage - 1) / kPage * kPage;
      return start;
    };
    const size_t tokens = s.max_tokens;
    x = take(tokens * s.hidden * s.item);           // [max_tokens, hidden] activations
    ids = take(tokens * s.topk * sizeof(int32_t));  // [max_tokens, topk] local slot or -1
    // [max_tokens, topk, hidden] fp32: what each expert made of each token, not weighted. Sums of
    // them would be smaller, but the answers would depend on which experts share a server.
    out = take(tokens * s.topk * s.hidden * sizeof(float));
    size = at;
  }
};

// A mapped file. Creation is exclusive and owner-only; opening checks owner and size.
class Mapping {
 public:
  Mapping(const std::string& path, size_t size, bool create) : size_(size) {
    const int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW | (create ? O_CREAT | O_EXCL : 0);
    const int fd = open(path.c_str(), flags, 0600);
    if (fd < 0) fail(path, create ? "create" : "open");
    struct stat info{};
    // posix_fallocate, not ftruncate: a full /dev/shm must be an error here, not a SIGBUS later.
    const int error = create ? posix_fallocate(fd, 0, static_cast<off_t>(size)) : fstat(fd, &info);
    if (error != 0) {
      errno = create ? error : errno;
      close(fd);
      if (create) unlink(path.c_str());
      const std::string room =
          " (" + std::to_string(size) + " bytes; if the file system is full, " +
          "enlarge it, in a container with --shm-size, or lower " + "--max-num-batched-tokens)";
      fail(path + (create ? room : ""), create ? "reserve memory for" : "read");
    }
    if (!create && (static_cast<size_t>(info.st_size) != size || info.st_uid != geteuid())) {
      close(fd);
      throw std::runtime_error(path + ": found " + std::to_string(info.st_size) +
                               " bytes of user " + std::to_string(info.st_uid) + ", expected " +
                               std::to_string(size) + " bytes of user " +
                               std::to_string(geteuid()) + "; both sides must be one deployment");
    }
    data_ = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (data_ == MAP_FAILED) fail(path, "map");
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  Mapping(Mapping&& other) noexcept : data_(other.data_), size_(other.size_) {
    other.data_ = MAP_FAILED;
  }
  ~Mapping() {
    if (data_ != MAP_FAILED) munmap(data_, size_);
  }

  char* data() const { return static_cast<char*>(data_); }

 private:
  [[noreturn]] static void fail(const std::string& path, const char* what) {
    throw std::runtime_error(std::string("cannot ") + what + " " + path + ": " +
                             std::strerror(errno));
  }

  void* data_ = MAP_FAILED;
  size_t size_;
};

// One attention server's slot on one MoE server.
class Slot {
 public:
  Slot(const std::string& path, const Shape& shape, bool create)
      : shape_(shape), offsets_(shape), mapping_(path, offsets_.size, create) {
    if (create) {
      // The file is all zeros, which is the initial state of every word.
      header().shape = shape;
      header().version = kVersion;
      header().magic = kMagic;
    } else if (header().magic != kMagic || header().version != kVersion ||
               header().shape != shape) {
      throw std::runtime_error(path + ": " + describe(header().shape) + " version " +
                               std::to_string(header().version) + ", expected " + describe(shape) +
                               " version " + std::to_string(kVersion) +
                               "; all servers must run the same model and package version");
    }
  }

  SlotHeader& header() const { return *reinterpret_cast<SlotHeader*>(mapping_.data()); }
  const Shape& shape() const { return shape_; }
  char* x() const { return mapping_.data() + offsets_.x; }
  int32_t* ids() const { return reinterpret_cast<int32_t*>(mapping_.data() + offsets_.ids); }
  float* out() const { return reinterpret_cast<float*>(mapping_.data() + offsets_.out); }

 private:
  static std::string describe(const Shape& s) {
    return "max_tokens=" + std::to_string(s.max_tokens) + " hidden=" + std::to_string(s.hidden) +
           " topk=" + std::to_string(s.topk) + " item=" + std::to_string(s.item);
  }

  Shape shape_;
  Offsets offsets_;
  Mapping mapping_;
};

class BoardMapping {
 public:
  BoardMapping(const std::string& path, bool create) : mapping_(path, kPage, create) {
    if (create) {
      board().version = kVersion;
      board().magic = kMagic;
    } else if (board().magic != kMagic || board().version != kVersion) {
      throw std::runtime_error(path + ": not the board of a MoE server of version " +
                               std::to_string(kVersion));
    }
  }
  Board& board() const { return *reinterpret_cast<Board*>(mapping_.data()); }

 private:
  Mapping mapping_;
};

}  // namespace expertplex
