// The threads of a CPU MoE server: workers that take tiles from the scheduler, and a clock for
// coalescing windows and deadlines. Whoever submits, and the clock, act as the scheduler's one
// controller under a mutex.
#pragma once
#include <sys/prctl.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>

#include "cpu/futex.h"
#include "cpu/job.h"
#include "cpu/trace.h"
#include "scheduler/coalesce.h"
#include "scheduler/scheduler.h"

namespace expertplex::cpu {
constexpr uint64_t kBeatNs = 1'000'000'000;  // nobody sleeps longer

inline uint64_t clock_ns() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

struct Settings {
  Config scheduler;
  TileSizes tiles[kPhases];
  bool fifo;                     // operations run one after the other, in order of arrival
  bool coalescing;               // decode operations of one layer run as one; not if fifo
  uint64_t window_ns, stale_ns;  // coalescing: see coalesce.h
  uint64_t spin_ns;              // an idle worker polls so long before it sleeps
  uint64_t deadline_ns;          // of one operation
  uint64_t trace_events;         // kept per worker
};

struct Submission {
  uint32_t source, phase, layer;
  Member member;
};

struct WorkerStats {
  Worker scheduling;
  uint64_t idle_ns, busy_ns[kPhases], weight_bytes[kPhases];
  Track track;
};

struct Totals {  // of operations
  uint64_t submitted[kPhases], done[kPhases];
  uint64_t coalesced;                      // decode operations that ran as part of another
  uint64_t share_sum, share_last, shares;  // q' of each decode operation that ran
};

class Engine {
 public:
  // `complete` is called from any thread with the handle of each finished member.
  Engine(Model model, const Products& products, const Settings& settings,
         std::function<void(void*)> complete)
      : model_(std::move(model)),
        products_(products),
        settings_(settings),
        complete_(std::move(complete)),
        state_(std::make_unique<State>()),
        workers_(settings.scheduler.workers) {
    init(*state_, settings.scheduler);
    coalescer_.window_ns = settings.window_ns;
    coalescer_.stale_ns = settings.stale_ns;
    coalescer_.layers = static_cast<uint32_t>(model_.layers.size());
    for (uint32_t i = 0; i < workers_.size(); ++i) {
      init(workers_[i].scheduling, i);
      workers_[i].track.reserve(settings.trace_events);
      threads_.emplace_back([this, i] { guarded([&] { work(workers_[i]); }); });
    }
    threads_.emplace_back([this] { guarded([&] { keep_time(); }); });
  }
  ~Engine() { stop(); }

  // Operations that became ready together. Throws std::runtime_error if anything has failed.
  void submit(std::span<const Submission> operations) {
    check();
    std::vector<Pooled*> empty;
    {
      std::lock_guard lock(control_);
      const uint64_t now = clock_ns();
      for (const Submission& s : operations) {
        if (settings_.fifo) {
          line_.push_back(s);
          continue;
        }
        if (s.phase != kDecode || !settings_.coalescing) {
          start(s.phase, uint64_t{1} << s.source, s.layer, {s.member}, now, empty);
          continue;
        }
        if (coalescer_.pending >> s.source & 1)  // its second in flight: the first goes now
          start_group(take(coalescer_, uint64_t{1} << s.source), now, empty);
        arrive(coalescer_, s.source, s.layer, now);
        waiting_[s.source] = s.member;
      }
      start_due(now, empty);
    }
    for (Pooled* job : empty) finished(*job);
  }

  // Ends all threads at their next tile; what is in flight stays unfinished. May be repeated.
  void stop() {
    {
      std::lock_guard lock(control_);
      stopping_ = true;
      request_stop(*state_, kAbort, clock_ns());
    }
    futex_wake(state_->work, ~0u);
    tick_.notify_all();
    for (std::thread& t : threads_)
      if (t.joinable()) t.join();
  }

  // Throws what a worker or the clock has met.
  void check() {
    std::lock_guard lock(failure_mutex_);
    if (failure_) throw std::runtime_error(*failure_);
  }

  Totals totals() {
    std::lock_guard lock(control_);
    Totals t = totals_;
    for (uint32_t p = 0; p < kPhases; ++p) t.done[p] = load_relaxed(totals_.done[p]);
    return t;
  }
  const std::vector<WorkerStats>& workers() const { return workers_; }
  const Settings& settings() const { return settings_; }
  const Model& model() const { return model_; }

 private:
  struct Pooled {
    Job job;
    uint32_t phase, busy;
  };

  void work(WorkerStats& me) {
    Scratch scratch(model_);
    prepare_products(scratch);
    uint64_t idle_since = 0;
    while (true) {
      const uint32_t seen = load_acquire(state_->work);
      const uint64_t now = clock_ns();
      Tile tile;
      const Next next = claim(*state_, me.scheduling, now, tile);
      if (next == Next::kStop) return;
      if (next == Next::kTile) {
        if (idle_since) count(me.idle_ns, now - idle_since);
        idle_since = 0;
        execute(me, tile, now, scratch);
        continue;
      }
      if (!idle_since) idle_since = now;
      if (next == Next::kIdle) idle(seen);
    }
  }

  void execute(WorkerStats& me, const Tile& tile, uint64_t begin, Scratch& scratch) {
    Slot& slot = state_->queue[tile.phase].slot[tile.slot];
    Pooled& pooled = *reinterpret_cast<Pooled*>(slot.op.user);
    const uint64_t bytes = pooled.job.weight_bytes(tile);
    const Event event{
        begin,         0,          tile.ticket, static_cast<uint32_t>(slot.op.sources),
        slot.op.layer, tile.phase, tile.stage};
    pooled.job.run(tile, slot, scratch);
    Operation op;
    const Finish result = finish(*state_, tile, op);
    if (result == Finish::kStageOpened) {
      const Ticket opened = unpack(load_relaxed(slot.ticket));
      if (opened.limit > 1) rouse(opened.limit - 1);  // this worker takes one itself
    }
    if (result == Finish::kDone) finished(pooled);
    const uint64_t end = clock_ns();
    count(me.busy_ns[tile.phase], end - begin);
    count(me.weight_bytes[tile.phase], bytes);
    me.track.add(event, end);
  }

  // Polls, then sleeps, until there is something new. A sleeper counts itself before it looks at
  // `work`, whoever changes `work` looks at the count afterwards: one of them sees the other.
  void idle(uint32_t seen) {
    for (const uint64_t until = clock_ns() + settings_.spin_ns; clock_ns() < until;)
      if (load_relaxed(state_->work) != seen) return;
    fetch_add(sleepers_, 1u);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    futex_wait(state_->work, seen, kBeatNs);
    fetch_add(sleepers_, ~0u);
  }
  void rouse(uint32_t tiles) {  // as many sleepers as there are new tiles
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (load_relaxed(sleepers_)) futex_wake(state_->work, tiles);
  }

  // Lets oneDNN generate the kernels that this thread will need.
  void prepare_products(Scratch& scratch) {
    const std::vector<char> zeros(
        static_cast<size_t>(kRows * std::max(model_.hidden, model_.intermediate) * 4));
    for (int64_t rows = 1; rows <= kRows; rows *= 2) {
      products_(model_.compute, rows, model_.hidden, zeros.data(), scratch.panel[0].data(),
                scratch.products.data(), 2 * kPanel);
      products_(model_.compute, rows, model_.intermediate, zeros.data(), scratch.panel[0].data(),
                scratch.products.data(), kPanel);
    }
  }

  // With FIFO: the operation before has ended and been told.
  void next_turn() {
    std::vector<Pooled*> empty;
    {
      std::lock_guard lock(control_);
      serving_ = false;
      if (stopping_) return;
      start_due(clock_ns(), empty);
    }
    for (Pooled* job : empty) finished(*job);
  }

  void keep_time() {
    prctl(PR_SET_TIMERSLACK, 1UL);  // ns; a window is 6 times the 50 us that timers may be late by
    std::unique_lock lock(control_);
    while (!stopping_) {
      const uint64_t now = clock_ns();
      std::vector<Pooled*> empty;
      start_due(now, empty);
      Overdue late;
      if (find_overdue(*state_, now, late)) throw std::runtime_error(describe(late));
      if (!empty.empty()) {
        lock.unlock();
        for (Pooled* job : empty) finished(*job);
        lock.lock();
        continue;
      }
      const uint64_t beat = std::clamp(settings_.deadline_ns / 4, kBeatNs / 1000, kBeatNs);
      const uint64_t wake = std::min(due_ns_, now + beat);
      tick_.wait_for(lock, std::chrono::nanoseconds(wake > now ? wake - now : 0));
    }
  }

  std::string describe(const Overdue& o) const {
    const Ticket t{o.claimed, o.tiles, 0, o.stage, false};
    return std::string(o.phase == kDecode ? "decode" : "prefill") + " operation of layer " +
           std::to_string(o.layer) + ", source " + std::to_string(lowest_bit(o.sources)) +
           ", has not finished in " + std::to_string(settings_.deadline_ns / 1'000'000) +
           " ms: stage " + kStageNames[t.stage] + ", " + std::to_string(o.claimed) + " of " +
           std::to_string(o.tiles) + " tiles claimed, " + std::to_string(o.unfinished) +
           " unfinished";
  }

  // What follows is the controller's: `control_` is held. `empty` collects operations without a
  // tile, to be completed when it is not.
  void start_due(uint64_t now, std::vector<Pooled*>& empty) {
    while (!line_.empty() && !serving_) {
      serving_ = true;
      const Submission s = line_.front();
      line_.pop_front();
      start(s.phase, uint64_t{1} << s.source, s.layer, {s.member}, now, empty);
    }
    uint64_t due;
    while (const uint64_t group = take_group(coalescer_, now, due)) start_group(group, now, empty);
    if (due < due_ns_) tick_.notify_one();
    due_ns_ = due;
  }
  void start_group(uint64_t group, uint64_t now, std::vector<Pooled*>& empty) {
    std::vector<Member> members;
    for (uint64_t m = group; m; m &= m - 1) members.push_back(waiting_[lowest_bit(m)]);
    totals_.coalesced += members.size() - 1;
    start(kDecode, group, coalescer_.layer[lowest_bit(group)], std::move(members), now, empty);
  }
  void start(uint32_t phase, uint64_t sources, uint32_t layer, std::vector<Member> members,
             uint64_t now, std::vector<Pooled*>& empty) {
    totals_.submitted[phase] += members.size();
    Pooled& pooled = unused();
    pooled.phase = phase;
    Operation op = pooled.job.begin(settings_.tiles[phase], sources, layer, std::move(members));
    op.user = reinterpret_cast<uint64_t>(&pooled);
    const Submit result = expertplex::submit(*state_, phase, op, now, now + settings_.deadline_ns);
    if (result == Submit::kFull) {
      store_release(pooled.busy, 0u);
      throw std::runtime_error("source " + std::to_string(lowest_bit(sources)) + " has more than " +
                               std::to_string(kDepth) + " operations of a phase in flight");
    }
    if (result == Submit::kNothingToDo) return empty.push_back(&pooled);
    if (phase == kDecode) {
      totals_.share_last = decode_workers(*state_);
      totals_.share_sum += totals_.share_last;
      ++totals_.shares;
    }
    rouse(op.tiles[next_stage(op, 0)]);
  }
  Pooled& unused() {
    for (auto& p : pool_)
      if (!load_acquire(p->busy)) return p->busy = 1, *p;
    pool_.push_back(std::make_unique<Pooled>(Job(model_, products_), 0u, 1u));
    return *pool_.back();
  }

  void finished(Pooled& pooled) {
    const auto members = pooled.job.take_members();
    const uint32_t phase = pooled.phase;
    store_release(pooled.busy, 0u);
    fetch_add(totals_.done[phase], uint64_t{members.size()});
    for (const Member& m : members) complete_(m.handle);
    if (settings_.fifo) next_turn();
  }

  template <class F>
  void guarded(F body) {  // a failure ends the other threads too, and is told by check()
    try {
      body();
    } catch (const std::exception& error) {
      {
        std::lock_guard lock(failure_mutex_);
        if (!failure_) failure_ = error.what();
      }
      request_stop(*state_, kAbort, clock_ns());
      futex_wake(state_->work, ~0u);
    }
  }

  const Model model_;
  const Products& products_;
  const Settings settings_;
  const std::function<void(void*)> complete_;
  std::unique_ptr<State> state_;
  std::vector<WorkerStats> workers_;
  alignas(128) uint32_t sleepers_ = 0;

  alignas(128) std::mutex control_;
  std::condition_variable tick_;
  Coalescer coalescer_{};
  Member waiting_[kMaxSources] = {};  // of the sources pending in the coalescer
  std::deque<Submission> line_;       // with FIFO: what has arrived and not begun
  bool serving_ = false;              // with FIFO: an operation has begun and not been told
  uint64_t due_ns_ = ~uint64_t{0};
  std::vector<std::unique_ptr<Pooled>> pool_;
  Totals totals_{};
  bool stopping_ = false;

  std::mutex failure_mutex_;
  std::optional<std::string> failure_;
  std::vector<std::thread> threads_;
};
}  // namespace expertplex::cpu
