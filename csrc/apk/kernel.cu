// The Adaptive Persistent Kernel: one launch runs the MoE operations of both phases, tile by tile,
// from the scheduler's queues (ExpertPlex section 4).
//
// A cluster of two CTAs is one worker. In each CTA warps 0-7 compute, warp 8 loads by TMA, warp 10
// stores and reports tiles as finished. In the leader CTA warp 9 claims tiles and sends each to all
// warps of both CTAs through a ring of two messages, so both CTAs and all warps run the same tiles
// in the same order. Warp 11 of CTA 0 is the controller, which submits operations; warp 11 of CTA 1
// watches the clock and the host's words.
// clang-format off
#include "claim.cuh"  // first: what follows is compiled as it was measured

#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>
// clang-format on

namespace expertplex::apk {

constexpr uint32_t kRing = 2;
constexpr uint32_t kTakers = kCluster * (kMathThreads / 32 + 2);

struct SharedMemory {
  GemmMemory gemm;
  TileMessage ring[kRing];
  Barrier ring_full[kRing], ring_empty[kRing];  // empty: the leader's, all takers of both CTAs
  Barrier output_full[2], output_empty[2];      // per warpgroup, one phase per tile
  Barrier claim_next;                           // one phase per tile: the leader may claim the next
  Claimer claimer;                              // the leader's
  StageCache known;
  uint64_t deadline;       // %globaltimer; 0 ends every wait of this CTA
  uint64_t tile_deadline;  // the same, for the leader's waits on its tiles
  Operation arriving;      // the controller's
  uint32_t ended;          // 1: this CTA has received the stop message
  uint64_t began[kRing];
  uint32_t peer_finished;  // tiles the other CTA has finished, kept in the leader
};

struct RingPosition {
  uint32_t count = 0;  // tiles before this one
  __device__ __forceinline__ uint32_t slot() const { return count % kRing; }
  __device__ __forceinline__ uint32_t parity() const { return count / kRing & 1; }
  __device__ __forceinline__ void advance() { ++count; }
};

__device__ __forceinline__ bool is_gemm(uint32_t stage) {
  return stage == kStageGateUp || stage == kStageDown;
}

// The current message; a stop if the deadline has passed.
__device__ __forceinline__ TileMessage take(SharedMemory& sh, const RingPosition& at) {
  const bool ok = sh.ring_full[at.slot()].wait_cluster(at.parity(), &sh.deadline);
  TileMessage m = sh.ring[at.slot()];
  if (!__all_sync(~0u, ok)) m.tile.stage = kStop;
  return m;
}

__device__ __forceinline__ void abort_cluster(SharedMemory& sh) {
  for (uint32_t cta = 0; cta < kCluster; ++cta)
    asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(peer_addr(smem_addr(&sh.deadline), cta)),
                 "l"(0ull)
                 : "memory");
}

__device__ __forceinline__ void report(const Launch& p, uint32_t reason, uint32_t cluster,
                                       const Tile& t, uint32_t layer) {
  if (atomicCAS_system(&p.report->reason, 0u, reason) != 0) return;
  p.report->cluster = cluster;
  p.report->phase = t.phase;
  p.report->stage = t.stage;
  p.report->layer = layer;
  p.report->ticket = t.ticket;
  p.report->slot = t.slot;
  __threadfence_system();
}

// One warp: a check epoch, its words written by all lanes.
__device__ __forceinline__ void announce_all(State& s, uint64_t now) {
  const uint32_t lane = threadIdx.x % 32;
  Epoch e{};
  if (lane == 0) e = draw_epoch(s, now);
  e = {__shfl_sync(~0u, e.number, 0), __shfl_sync(~0u, e.stop, 0),
       __shfl_sync(~0u, e.decode_workers, 0)};
  announce(s, e, lane, 32);
  __syncwarp();
}

// One warp.
__device__ __forceinline__ void stop_workers(State& s, uint32_t how) {
  if (threadIdx.x % 32 == 0) raise(s.stop, how);
  __syncwarp();
  announce_all(s, global_ns());
  if (threadIdx.x % 32 == 0) wake(s);
}

// One thread: waits for a tile of any stage. False: stop.
__device__ __forceinline__ bool claim_any(SharedMemory& sh, const Launch& p, Tile& tile) {
  State& s = *p.state;
  while (true) {
    const uint32_t seen = load_acquire(s.work);
    const uint64_t now = global_ns();
    sh.claimer.word =
        load_relaxed(s.p[sh.claimer.worker.index].value);  // at or before what claim() sees
    const Next next = claim(s, sh.claimer.worker, now, tile);
    if (next == Next::kStop) return false;
    if (next == Next::kTile) {
      if (p.times) {
        auto* first = &p.times[s.queue[tile.phase].slot[tile.slot].op.user >> 16].first_tile;
        if (load_relaxed(*first) == 0) store_relaxed(*first, global_ns());
      }
      return true;
    }
    if (next == Next::kIdle)
      while (load_relaxed(s.work) == seen && global_ns() < now + 20000) {
      }
    if (global_ns() >= *static_cast<volatile uint64_t*>(&sh.deadline)) return false;
  }
}

// Warp 9 of the leader CTA.
__device__ __forceinline__ void schedule(SharedMemory& sh, const Launch& p, uint32_t cluster) {
  const uint32_t lane = threadIdx.x % 32;
  State& s = *p.state;
  Claimer& claimer = sh.claimer;
  TileMessage m{};
  if (lane == 0) {
    init(claimer.worker, cluster);
    claimer.known = false;
  }
  __syncwarp();
  for (RingPosition at;; at.advance()) {
    const uint64_t now = global_ns();
    const uint64_t limit = min(now + p.tile_ns, *static_cast<volatile uint64_t*>(&sh.deadline));
    *static_cast<volatile uint64_t*>(&sh.tile_deadline) = limit;
    __syncwarp();
    bool ok = sh.ring_empty[at.slot()].wait(at.parity() ^ 1, &sh.tile_deadline);
    if (at.count) ok &= sh.claim_next.wait((at.count - 1) & 1, &sh.tile_deadline);
    if (!__all_sync(~0u, ok)) {  // the tile before does not get on
      if (lane == 0) {
        report(p, limit == now + p.tile_ns ? 2 : 1, cluster, m.tile, m.layer());
        abort_cluster(sh);
        raise(s.stop, static_cast<uint32_t>(kAbort));  // watch() tells the others
      }
    }
    uint32_t got = 0;  // 0 none: stop, 1 of the known stage, 2 of any
    if (lane == 0 && ok) {
      got = claim_again(s, claimer, m.tile) ? 1 : claim_any(sh, p, m.tile) ? 2 : 0;
    }
    got = __shfl_sync(~0u, got, 0);
    uint32_t* words = reinterpret_cast<uint32_t*>(&m.tile);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) words[i] = __shfl_sync(~0u, words[i], 0);
    if (got == 2) learn_stage(s, p.templates, m.tile, sh.known);
    if (got == 0) m.tile.stage = kStop;
    m.where = sh.known.where;
    m.row = m.col = m.packed = 0;
    if (got && is_gemm(m.tile.stage)) {
      const bool down = m.tile.stage == kStageDown;
      locate_tile(sh.known, sh.known.wide, down ? kDown : kGateUp, m.tile.ticket, m);
    }
    if (lane < kCluster) {
      sh.ring_full[at.slot()].arrive_expect_at(sizeof(TileMessage), lane);
      const uint32_t dst = peer_addr(smem_addr(&sh.ring[at.slot()]), lane),
                     bar = peer_addr(smem_addr(&sh.ring_full[at.slot()]), lane);
      const uint4* v = reinterpret_cast<const uint4*>(&m);
      store_async(dst, bar, v[0]);
      store_async(dst + 16, bar, v[1]);
    }
    __syncwarp();
    if (!got) return;
    if (got == 2 && lane == 0) claimer.known = may_repeat(s, claimer, m.tile, s.config.quantum);
  }
}

// Warp 8: loads.
__device__ __forceinline__ void produce(SharedMemory& sh, const Launch& p, uint32_t rank) {
  const uint32_t lane = threadIdx.x % 32;
  PipelineState pipe;
  for (RingPosition at;; at.advance()) {
    const TileMessage m = take(sh, at);
    if (lane == 0) sh.ring_empty[at.slot()].arrive_at(0);
    if (m.tile.stage == kStop) break;
    if (is_gemm(m.tile.stage)) {
      const uint32_t blocks = gemm_k_blocks(m.tile.stage == kStageDown ? kDown : kGateUp);
      const uint32_t mark = blocks > kClaimAhead ? blocks - kClaimAhead : 0;
      load_tile(sh.gemm, pipe, m, at.slot(), rank, p.templates[m.operation()], p.layers[m.layer()],
                &sh.deadline, [&](uint32_t k) {
                  if (k == mark && rank == 0 && lane == 0) sh.claim_next.arrive();
                });
    } else if constexpr (kFp8) {
      sh.gemm.scales_full[at.slot()].arrive();
    }
  }
  if (lane == 0) store_relaxed(sh.ended, 1u);
  for (uint32_t i = 0; i < kStages; ++i, pipe.advance())
    sh.gemm.empty[pipe.stage].wait(pipe.parity ^ 1, &sh.deadline);
}

// Warp 10, one thread: stores, and reports to the scheduler.
__device__ __forceinline__ void complete(SharedMemory& sh, const Launch& p, uint32_t rank,
                                         uint32_t cluster) {
  State& s = *p.state;
  uint32_t traced = 0;
  for (RingPosition at;; at.advance()) {
    const bool ok = sh.ring_full[at.slot()].wait_cluster(at.parity(), &sh.deadline);
    const TileMessage m = sh.ring[at.slot()];
    sh.ring_empty[at.slot()].arrive_at(0);
    if (!ok || m.tile.stage == kStop) break;
    const bool gemm = is_gemm(m.tile.stage);
    bool done = true;
    for (uint32_t group = 0; group < 2; ++group) {
      done &= sh.output_full[group].wait(at.count & 1, &sh.deadline);
      if (gemm && done) store_output(sh.gemm, m, group, p.templates[m.operation()]);
    }
    const uint64_t began = sh.began[at.slot()];
    if (gemm) {
      asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
    }
    for (uint32_t group = 0; group < 2; ++group) sh.output_empty[group].arrive();
    if (gemm) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    if (!done) break;
    fence_async_global();
    if (rank != 0) {
      asm volatile("red.release.cluster.shared::cluster.add.u32 [%0], 1;" ::"r"(
                       peer_addr(smem_addr(&sh.peer_finished), 0))
                   : "memory");
      continue;
    }
    uint32_t peer = 0;
    do {
      asm volatile("ld.acquire.cluster.shared::cta.u32 %0, [%1];"
                   : "=r"(peer)
                   : "r"(smem_addr(&sh.peer_finished))
                   : "memory");
    } while (static_cast<int32_t>(peer - at.count) <= 0 &&
             global_ns() < *static_cast<volatile uint64_t*>(&sh.deadline));
    if (static_cast<int32_t>(peer - at.count) <= 0) break;
    Operation op;
    // Still this operation's: its stage has a tile unfinished.
    const uint32_t identity =
        p.trace ? static_cast<uint32_t>(s.queue[m.tile.phase].slot[m.tile.slot].op.user >> 16) : 0;
    const Finish result = finish(s, m.tile, op);
    const uint64_t now = global_ns();
    if (result == Finish::kDone && p.times) store_release(p.times[op.user >> 16].done, now);
    if (p.trace && traced < p.trace_capacity)
      p.trace[static_cast<size_t>(cluster) * p.trace_capacity + traced++] = {
          began, now, m.tile.phase, m.tile.stage, identity, m.tile.ticket};
  }
  if (p.trace && rank == 0) p.trace_count[cluster] = traced;
}

// Warps 0-7.
__device__ __forceinline__ void compute(SharedMemory& sh, const Launch& p, uint32_t rank) {
  const uint32_t lane = threadIdx.x % 32, group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  PipelineState pipe;
  for (RingPosition at;; at.advance()) {
    // Read in place: the slot is this tile's until its warps have arrived at ring_empty.
    const bool ok = sh.ring_full[at.slot()].wait_cluster(at.parity(), &sh.deadline);
    const TileMessage& m = sh.ring[at.slot()];
    if (!__all_sync(~0u, ok) || m.tile.stage == kStop) break;
    if (threadIdx.x == 0) sh.began[at.slot()] = global_ns();
    auto output_free = [&] { sh.output_empty[group].wait((at.count & 1) ^ 1, &sh.deadline); };
    auto claim_next = [&] {
      if (rank == 0 && threadIdx.x == 0) sh.claim_next.arrive();
    };
    if (is_gemm(m.tile.stage)) {
      if constexpr (kFp8) sh.gemm.scales_full[at.slot()].wait(at.parity(), &sh.deadline);
      const float* scales = sh.gemm.weight_scales[at.slot()];
      if (m.tile.stage == kStageGateUp)
        multiply_tile<kGateUp>(sh.gemm, pipe, m, scales, &sh.deadline, output_free);
      else
        multiply_tile<kDown>(sh.gemm, pipe, m, scales, &sh.deadline, output_free);
    } else {
      const Template& op = p.templates[m.operation()];
      output_free();
      sync_threads<kMathThreads>(1);
      if (m.tile.stage == kCount) {
        claim_next();
        count_tile(*p.state, m, op, rank, reinterpret_cast<uint32_t*>(sh.gemm.output));
      } else if (m.tile.stage == kCopy) {
        copy_tile(m, op, rank, claim_next);
      } else if (m.tile.stage == kActivate) {
        activate_tile(m, op, rank, claim_next);
      } else if (m.tile.stage == kGather) {
        gather_tile(m, op, rank, claim_next);
      } else {  // kHang
        while (global_ns() < *static_cast<volatile uint64_t*>(&sh.deadline)) __nanosleep(1000);
      }
    }
    __syncwarp();
    sh.output_full[group].arrive();
    if (lane == 0) sh.ring_empty[at.slot()].arrive_at(0);
  }
}

// Warp 11 of CTA 0: the controller.
__device__ __forceinline__ void control(SharedMemory& sh, const Launch& p, uint64_t start_ns) {
  const uint32_t lane = threadIdx.x % 32;
  State& s = *p.state;
  for (uint32_t next = 0; next < p.n_arrivals;) {
    const Arrival& arrival = p.arrivals[next];
    const uint64_t due = start_ns + arrival.at_ns;
    uint64_t now = global_ns();
    Operation& op = sh.arriving;  // read before it is due
    const auto* from = reinterpret_cast<const uint32_t*>(&arrival.op);
    if (lane < sizeof(Operation) / 4) reinterpret_cast<uint32_t*>(&op)[lane] = from[lane];
    __syncwarp();
    const uint64_t* earlier = arrival.after == ~0u ? nullptr : &p.times[arrival.after].done;
    while ((now < due || (earlier && load_acquire(*earlier) == 0)) && load_relaxed(s.stop) == kRun)
      now = global_ns();
    if (load_relaxed(s.stop) != kRun) return;
    uint32_t queued = 0;
    if (lane == 0) {
      if (p.times) p.times[op.user >> 16].submitted = now;
      queued = enqueue(s, arrival.phase, op, ~0ull) == Submit::kQueued;
    }
    queued = __shfl_sync(~0u, queued, 0);
    if (!queued) continue;  // its source has two operations in flight
    ++next;
    if (arrival.phase == kDecode) announce_all(s, now);
    if (lane == 0) wake(s);
    __syncwarp();
  }
  stop_workers(s, kDrain);
}

// Warp 11 of CTA 1: the words the host shares, which take microseconds to read, and the time limit.
__device__ __forceinline__ void watch(SharedMemory& sh, const Launch& p) {
  State& s = *p.state;
  uint32_t told = kRun;
  while (load_relaxed(sh.ended) == 0) {
    const uint64_t now = global_ns();
    *static_cast<volatile uint64_t*>(p.heartbeat) = now;
    uint32_t stop = *static_cast<const volatile uint32_t*>(p.stop);
    if (load_relaxed(s.stop) == kAbort) stop = kAbort;
    if (now >= *static_cast<volatile uint64_t*>(&sh.deadline)) {
      if (threadIdx.x % 32 == 0) report(p, 1, 0, Tile{}, 0);
      stop = kAbort;
    }
    if (stop > told) stop_workers(s, told = stop);
    __nanosleep(2000);
  }
}

}  // namespace expertplex::apk

namespace apk = expertplex::apk;

extern "C" __global__ void expertplex_apk_init(expertplex::State* state,
                                               expertplex::Config config) {
  init(*state, config);
}

extern "C" __global__ void __cluster_dims__(apk::kCluster, 1, 1) __launch_bounds__(apk::kThreads, 1)
    expertplex_apk(const __grid_constant__ apk::Launch p) {
  using namespace expertplex;
  using namespace expertplex::apk;
  extern __shared__ __align__(1024) uint8_t memory[];
  SharedMemory& sh = *reinterpret_cast<SharedMemory*>(memory);
  const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const uint32_t rank = cute::block_rank_in_cluster(), cluster = blockIdx.x / kCluster;
  const uint64_t start_ns = global_ns();
  if (threadIdx.x == 0) {
    for (uint32_t i = 0; i < kStages; ++i) {
      sh.gemm.full[i].init(1);
      sh.gemm.empty[i].init(kCluster * kMathThreads / 32);
    }
    for (uint32_t i = 0; i < kRing; ++i) {
      sh.ring_full[i].init(1);
      sh.ring_empty[i].init(kTakers);
      sh.gemm.scales_full[i].init(32);
    }
    for (uint32_t i = 0; i < 2; ++i) {
      sh.output_full[i].init(128);
      sh.output_empty[i].init(1);
    }
    sh.claim_next.init(1);
    sh.peer_finished = sh.ended = 0;
    sh.deadline = start_ns + p.max_ns;
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_async_shared();
  }
  cute::cluster_arrive();
  cute::cluster_wait();
  if (warp >= kMathThreads / 32) {
    cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();
    if (warp == 8)
      produce(sh, p, rank);
    else if (warp == 9 && rank == 0)
      schedule(sh, p, cluster);
    else if (warp == 10 && lane == 0)
      complete(sh, p, rank, cluster);
    else if (warp == 11 && blockIdx.x == 0)
      control(sh, p, start_ns);
    else if (warp == 11 && blockIdx.x == 1)
      watch(sh, p);
    __syncwarp();
  } else {
    cutlass::arch::warpgroup_reg_alloc<kMathRegisters>();
    compute(sh, p, rank);
  }
  cute::cluster_arrive();  // the peer may still arrive at barriers of this CTA
  cute::cluster_wait();
}

// Sizes for the host's mirror of these structures, checked at start.
extern "C" __device__ const uint32_t expertplex_apk_sizes[] = {
    sizeof(expertplex::State),         sizeof(expertplex::apk::Groups),
    sizeof(expertplex::apk::Template), sizeof(expertplex::apk::Layer),
    sizeof(expertplex::apk::Arrival),  sizeof(expertplex::apk::TileTime),
    sizeof(expertplex::apk::Launch),   sizeof(expertplex::apk::SharedMemory),
    sizeof(expertplex::Config),        sizeof(expertplex::apk::Times)};
