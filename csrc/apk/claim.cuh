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

// One thread. The next ticket of the last tile's stage, if p_i is what it was. kStop: none. The
// stage may end meanwhile, if the last tile was short; the ticket is then one of the stage or the
// operation that follows in this slot (see scheduler/queue.h), and as good.
__device__ __forceinline__ Found claim_again(State& s, Claimer& c, Tile& tile) {
  if (!c.known) return Found::kStop;
  c.known = false;
  if (load_acquire(s.p[c.worker.index].value) != c.word) return Found::kStop;
  const Ticket t = unpack(fetch_add(s.queue[tile.phase].slot[tile.slot].ticket, uint64_t{1}));
  if (t.next >= t.limit) return Found::kStop;
  const bool same = (t.seq & 0xfffu) == tile.seq;
  tile.ticket = t.next;
  tile.seq = static_cast<uint16_t>(t.seq);
  tile.stage = static_cast<uint8_t>(t.stage);
  ++c.worker.cursor[tile.phase].taken;
  count(c.worker.counters.tiles[tile.phase], 1);
  c.known = c.worker.cursor[tile.phase].taken + 1 < s.config.quantum;
  return same ? Found::kSameStage : Found::kTile;
}

// The whole warp: what the tile's operation looks like, from global memory.
__device__ __forceinline__ void learn_stage(const State& s, const Template* templates,
                                            const Tile& tile, StageCache& cache) {
  const uint32_t lane = threadIdx.x % 32;
  if (lane == 0) {
    const Operation& op = s.queue[tile.phase].slot[tile.slot].op;
    cache.where = static_cast<uint32_t>(op.user & 0xfff) | op.layer << 16;
    cache.tokens = tokens_of(op.user);
  }
  __syncwarp();
  const Groups& g = *templates[cache.where & 0x3ff].groups;
  if (tile.stage != kStageGateUp && tile.stage != kStageDown) {
    if (lane == 0)
      cache.items = tile.stage == kActivate ? __ldcg(&g.activate_items)
                                            : items_per_warp(tile.stage, cache.tokens);
    __syncwarp();
    return;
  }
  const uint32_t* tiles = g.tiles[tile.stage == kStageDown ? kDown : kGateUp];
#pragma unroll 4
  for (uint32_t e = lane; e < kExperts; e += 32) {
    cache.tiles[e + 1] = __ldcg(tiles + e + 1);
    cache.rows[e] = __ldcg(g.rows + e);
    cache.row0[e] = __ldcg(g.row0 + e);
  }
  if (lane == 0) cache.tiles[0] = 0;
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
