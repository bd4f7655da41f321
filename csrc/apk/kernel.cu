// The Adaptive Persistent Kernel: one launch runs the MoE operations of both phases, tile by tile,
// from the scheduler's queues (ExpertPlex section 4).
//
// A cluster of two CTAs is one worker. In each CTA warps 0-7 compute, warp 8 loads by TMA, warp 10
// stores and reports tiles as finished. In the leader CTA warp 9 claims tiles and sends each to all
// warps of both CTAs through a ring of two messages, so both CTAs and all warps run the same tiles
// in the same order. Warp 11 of CTA 0 is the controller, which submits operations; warp 11 of every
// CTA 1 tells the host what its cluster has done, and cluster 0's also watches the clock and the
// host's words.
// clang-format off
#include "control.cuh"  // first: what follows is compiled as it was measured

#include <cutlass/arch/reg_reconfig.h>

#include <cute/arch/cluster_sm90.hpp>
// clang-format on

namespace expertplex::apk {

// Have all warps of the cluster done with the tile before `at`?
__device__ __forceinline__ bool ended_before(SharedMemory& sh, const RingPosition& at) {
  if (at.count == 0) return true;
  const RingPosition before{at.count - 1};
  return sh.ring_empty[before.slot()].wait(before.parity(), &sh.tile_deadline);
}

// One thread: waits for a tile of any stage. While there is none, nothing but this looks after the
// tile before, which may hang.
__device__ __forceinline__ Found claim_any(SharedMemory& sh, const Launch& p,
                                           const RingPosition& at, Tile& tile) {
  State& s = *p.state;
  uint64_t idle_since = 0;
  while (true) {
    const uint32_t seen = load_acquire(s.work);
    const uint64_t now = global_ns();
    if (idle_since) count(sh.tally.idle_ns, now - idle_since);
    idle_since = now;
    sh.claimer.word =
        load_relaxed(s.p[sh.claimer.worker.index].value);  // at or before what claim() sees
    const Next next = claim(s, sh.claimer.worker, now, tile);
    if (next == Next::kStop) return Found::kStop;
    if (next == Next::kTile) return Found::kTile;
    const bool hold = next == Next::kHold;
    if (!hold || (at.count && tile.phase == kDecode)) {
      const Found found = await_stage(s, sh.claimer, seen, hold, now + (hold ? 5000 : 20000), tile);
      if (found != Found::kStop) return found;
    }
    if (global_ns() >= *static_cast<volatile uint64_t*>(&sh.tile_deadline) && !ended_before(sh, at))
      return Found::kOverdue;
    if (global_ns() >= *static_cast<volatile uint64_t*>(&sh.deadline)) return Found::kStop;
  }
}

// One thread. When a finite run's operation began.
__device__ __forceinline__ void stamp_first(const Launch& p, const Tile& tile) {
  if (!p.times) return;
  const uint64_t user = p.state->queue[tile.phase].slot[tile.slot].op.user;
  auto* first = &p.times[identity_of(user)].first_tile;
  if (load_relaxed(*first) == 0) store_relaxed(*first, global_ns());
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
    sh.known.where = 0;
  }
  __syncwarp();
  for (RingPosition at;; at.advance()) {
    const uint64_t now = global_ns();
    const uint64_t limit = min(p.tile_ns ? now + p.tile_ns : ~uint64_t{0},
                               *static_cast<volatile uint64_t*>(&sh.deadline));
    *static_cast<volatile uint64_t*>(&sh.tile_deadline) = limit;
    __syncwarp();
    bool ok = sh.ring_empty[at.slot()].wait(at.parity() ^ 1, &sh.tile_deadline);
    if (at.count) ok &= sh.claim_next.wait((at.count - 1) & 1, &sh.tile_deadline);
    ok = __all_sync(~0u, ok);
    Found found = Found::kOverdue;
    if (lane == 0) {
      if (ok) found = claim_again(s, claimer, m.tile);
      if (found == Found::kStop) found = claim_any(sh, p, at, m.tile);
      if (found == Found::kStop && !ended_before(sh, at)) found = Found::kOverdue;
      if (found == Found::kTile) stamp_first(p, m.tile);
      if (found == Found::kOverdue) {
        const bool out = global_ns() >= *static_cast<volatile uint64_t*>(&sh.deadline);
        report(p, out ? kOutOfTime : kTileTooLong,
               {.cluster = cluster,
                .phase = m.tile.phase,
                .stage = m.tile.stage,
                .layer = m.layer(),
                .ticket = m.tile.ticket,
                .slot = m.tile.slot});
        abort_cluster(sh);
        raise(s.stop, static_cast<uint32_t>(kAbort));  // watch() tells the others
      }
    }
    found = static_cast<Found>(__shfl_sync(~0u, static_cast<uint32_t>(found), 0));
    const bool got = found == Found::kSameStage || found == Found::kTile;
    uint32_t* words = reinterpret_cast<uint32_t*>(&m.tile);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) words[i] = __shfl_sync(~0u, words[i], 0);
    if (found == Found::kTile) learn_stage(s, p.templates, m.tile, sh.known);
    if (!got) m.tile.stage = kStop;
    m.where = sh.known.where;
    m.row = sh.known.items;
    m.col = 0;
    m.packed = sh.known.tokens;
    if (got && is_gemm(m.tile.stage)) {
      const bool down = m.tile.stage == kStageDown;
      locate_tile(sh.known, down ? kDown : kGateUp, m.tile.ticket, m);
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
    if (found == Found::kTile && lane == 0)
      claimer.known = may_repeat(s, claimer, m.tile, s.config.quantum);
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
  if (lane == 0) atomicExch(&sh.ended, 1u);
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
        p.trace ? identity_of(s.queue[m.tile.phase].slot[m.tile.slot].op.user) : 0;
    const Finish result = finish(s, m.tile, op);
    const uint64_t now = global_ns();
    if (result == Finish::kDone) publish(p, op, now);
    count(sh.tally.busy_ns[m.tile.phase], now - began);
    if (gemm) count(sh.tally.weight_bytes, weight_bytes(m));
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
      if (rank == 0 && threadIdx.x == 0) sh.claim_next.arrive();
      auto& scratch = *reinterpret_cast<ScatterMemory*>(sh.gemm.output);
      if (m.tile.stage == kCount) {
        count_tile(p, m, op, rank, scratch);
      } else if (m.tile.stage == kCopy && counts_itself(m.tokens())) {
        scatter_tile(p, m, op, rank, scratch);
      } else if (m.tile.stage == kCopy) {
        copy_tile(p, m, op, rank);
      } else if (m.tile.stage == kActivate) {
        activate_tile(m, op, rank);
      } else if (m.tile.stage == kGather) {
        gather_tile(p, m, op, rank);
      } else {  // kHang
        while (global_ns() < *static_cast<volatile uint64_t*>(&sh.deadline)) __nanosleep(1000);
      }
    }
    __syncwarp();
    sh.output_full[group].arrive();
    if (lane == 0) sh.ring_empty[at.slot()].arrive_at(0);
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
    sh.deadline = p.max_ns ? (start_ns + p.max_ns) | 1 : ~uint64_t{0};
    sh.tally = Tally{};
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
    else if (warp == 11 && rank == 1)
      watch(sh, p, cluster);
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
    sizeof(expertplex::State),           sizeof(expertplex::apk::Groups),
    sizeof(expertplex::apk::Template),   sizeof(expertplex::apk::Layer),
    sizeof(expertplex::apk::Arrival),    sizeof(expertplex::apk::TileTime),
    sizeof(expertplex::apk::Launch),     sizeof(expertplex::apk::SharedMemory),
    sizeof(expertplex::Config),          sizeof(expertplex::apk::Times),
    sizeof(expertplex::apk::ServedSlot), sizeof(expertplex::apk::Report),
    sizeof(expertplex::apk::Members)};
