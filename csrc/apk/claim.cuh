// How a cluster's leader gets its next tile: the scheduler's claim(), and a short cut for the
// common case.
//
// A claim looks at five words in L2 one after the other, then at the operation and its groups:
// several microseconds, as much as a short tile lasts. When nothing has changed since the last
// claim, the next ticket of the same stage is what claim() would return, and the operation is the
// one already known.
#pragma once

#include "scatter.cuh"

namespace expertplex::apk {

// What the leader knows of the stage it is working on. Shared memory, one warp's own.
struct StageCache {
  uint32_t tiles[kExperts + 1], rows[kExperts], row0[kExperts];
  uint32_t where;   // template:10 | merged:1 | wide:1 | layer << 16
  uint32_t tokens;  // of the operation
  uint32_t items;   // of a row stage: a warp's per tile
};

struct Claimer {
  Worker worker;  // its counters are what the host is told
  uint64_t word;  // p_i at the last claim
  bool known;     // the last claim found a tile, and the next may be taken the short way
};

// One thread. Is the stage of the last tile still what this worker should look at first?
__device__ __forceinline__ bool may_repeat(const State& s, const Claimer& c, const Tile& last,
                                           uint32_t quantum) {
  const Cursor& cursor = c.worker.cursor[last.phase];
  if (cursor.source != last.slot / kDepth || cursor.taken + 1 >= quantum) return false;
  if (last.phase == (c.word & 0xff)) return true;  // preferred
  // A prefill tile where decode is preferred: only while no decode operation is in flight. One that
  // arrives later changes p_i.
  return last.phase == kPrefill && load_acquire(s.queue[kDecode].busy) == 0;
}

// What the leader has found to do.
enum class Found : uint32_t {
  kStop,
  kOverdue,    // nothing: the tile before has not ended in time
  kSameStage,  // a tile of the stage it knows
  kTile,       // a tile of any
};

// One thread. The next ticket of whatever is open in the last tile's slot; kStop: none. Its stage
// may have ended meanwhile: the ticket is then one of the stage or the operation that follows there
// (see scheduler/queue.h), and as good.
__device__ __forceinline__ Found draw_again(State& s, Claimer& c, Tile& tile) {
  c.known = false;
  const Ticket t = unpack(fetch_add(s.queue[tile.phase].slot[tile.slot].ticket, uint64_t{1}));
  if (t.next >= t.limit) return Found::kStop;
  const bool same = (t.seq & 0xfffu) == tile.seq;
  tile.ticket = t.next;
  tile.seq = static_cast<uint16_t>(t.seq);
  tile.stage = static_cast<uint8_t>(t.stage);
  c.worker.hold_until = 0;
  ++c.worker.cursor[tile.phase].taken;
  count(c.worker.counters.tiles[tile.phase], 1);
  c.known = c.worker.cursor[tile.phase].taken + 1 < s.config.quantum;
  return same ? Found::kSameStage : Found::kTile;
}

// One thread. The short way to the next tile, if it is open: see may_repeat().
__device__ __forceinline__ Found claim_again(State& s, Claimer& c, Tile& tile) {
  if (!c.known || load_acquire(s.p[c.worker.index].value) != c.word) return Found::kStop;
  return draw_again(s, c, tile);
}

// One thread, which has found nothing to claim. Until there may be something, or `until`; the stage
// that follows the last tile's is taken as soon as it opens. `seen`: the scheduler's work word
// before; `hold`: nothing but that stage is waited for.
__device__ __forceinline__ Found await_stage(State& s, Claimer& c, uint32_t seen, bool hold,
                                             uint64_t until, Tile& tile) {
  bool changed = false;
  do {
    const uint64_t word = load_relaxed(s.p[c.worker.index].value);  // three loads in flight
    const Ticket t = unpack(load_relaxed(s.queue[tile.phase].slot[tile.slot].ticket));
    const uint32_t work = load_relaxed(s.work);
    if (word != c.word || (hold && t.last)) break;  // that operation has no stage to come
    if (t.next < t.limit) {
      if (draw_again(s, c, tile) == Found::kStop) break;
      c.worker.last_phase = tile.phase;
      c.worker.tile_epoch = c.worker.epoch;
      return Found::kTile;
    }
    if (changed) break;  // the ticket has been read since
    changed = !hold && work != seen;
  } while (global_ns() < until);
  return Found::kStop;
}

__device__ __forceinline__ void learn_groups(const Groups& g, uint32_t stage, StageCache& cache) {
  const uint32_t lane = threadIdx.x % 32;
  if (stage == kActivate && lane == 0) cache.items = __ldcg(&g.activate_items);
  if (stage != kStageGateUp && stage != kStageDown) return;
  const uint32_t* tiles = g.tiles[stage == kStageDown ? kDown : kGateUp];
#pragma unroll 4
  for (uint32_t e = lane; e < kExperts; e += 32) {
    cache.tiles[e + 1] = __ldcg(tiles + e + 1);
    cache.rows[e] = __ldcg(g.rows + e);
    cache.row0[e] = __ldcg(g.row0 + e);
  }
  if (lane == 0) cache.tiles[0] = 0;
}

// The whole warp: what the tile's operation looks like, from global memory. Most often it is the
// operation of the tile before, so its groups are loaded without waiting for the answer.
__device__ __forceinline__ void learn_stage(const State& s, const Template* templates,
                                            const Tile& tile, StageCache& cache) {
  const uint32_t lane = threadIdx.x % 32, before = cache.where & 0x3ff;
  uint32_t where = 0, tokens = 0;
  if (lane == 0) {
    const Operation& op = s.queue[tile.phase].slot[tile.slot].op;
    where = static_cast<uint32_t>(op.user & 0xfff) | op.layer << 16;
    tokens = tokens_of(op.user);
  }
  __syncwarp();
  learn_groups(*templates[before].groups, tile.stage, cache);
  where = __shfl_sync(~0u, where, 0);
  if ((where & 0x3ff) != before) learn_groups(*templates[where & 0x3ff].groups, tile.stage, cache);
  if (lane == 0) {
    cache.where = where;
    cache.tokens = tokens;
    if (tile.stage != kActivate) cache.items = items_per_warp(tile.stage, tokens);
  }
  __syncwarp();
}

// Which rows and columns a ticket of a GEMM stage stands for; the warp's lanes search the experts
// together, and lane r gets the message of CTA r.
__device__ __forceinline__ void locate_tile(const StageCache& cache, uint32_t gemm, uint32_t ticket,
                                            TileMessage& m) {
  const uint32_t n = gemm_n(gemm), lane = threadIdx.x % 32, rank = lane;
  uint32_t expert = 0;
#pragma unroll
  for (uint32_t e = 0; e < kExperts; e += 32)
    expert +=
        __popc(__ballot_sync(~0u, e + lane < kExperts && cache.tiles[e + lane + 1] <= ticket));
  const uint32_t within = ticket - cache.tiles[expert], rows = cache.rows[expert];
  uint32_t shape, block, col;
  if (m.wide()) {
    const uint32_t blocks = ceil_div(rows, 128), cols = ceil_div(n, kWideN), pairs = blocks / 2;
    if (within < pairs * cols) {
      const uint32_t band = within / (kRaster * cols), rest = within - band * kRaster * cols;
      const uint32_t height = min(kRaster, pairs - band * kRaster);
      shape = kPairRows;
      block = (band * kRaster + rest % height) * 2 + rank;
      col = rest / height * kWideN;
    } else {
      shape = kPairCols;
      block = blocks - 1;
      col = ((within - pairs * cols) * 2 + rank) * kWideN;
    }
  } else if (rows <= 64) {
    shape = kStackCols;
    block = 0;
    col = (within * 2 + rank) * 2 * kDecodeN;
  } else {
    const uint32_t blocks = ceil_div(rows, 128);
    shape = kStackRows;
    block = within % blocks;
    col = (within / blocks * 2 + rank) * kNarrowN;
  }
  const uint32_t valid = col < n ? min(128u, rows - block * 128) : 0;
  m.row = cache.row0[expert] + block * 128;
  m.col = col;
  m.packed = valid | expert << 8 | shape << 24;
}

}  // namespace expertplex::apk
