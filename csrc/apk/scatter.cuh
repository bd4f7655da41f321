// Scatter: token rows into expert order, by the math warps of both CTAs of a cluster.
//
// Every (token, expert) pair gets a place among its expert's rows. A large operation has a stage
// that counts (places come from counters in global memory) and one that copies. In a small one each
// CTA counts all pairs for itself, always with the same outcome, and copies its own at once.
#pragma once

#include "preempt.cuh"
#include "rows.cuh"

namespace expertplex::apk {

constexpr uint32_t kMathWarps = kMathThreads / 32;
constexpr uint32_t kPairsEach = kCountPairs / kMathThreads;  // per thread of a CTA that counts

// Cluster tiles of one expert's rows, and x_moe's unit: see locate_tile() for the order.
__host__ __device__ constexpr uint32_t expert_tiles(uint32_t rows, uint32_t n, bool wide) {
  if (wide) {
    const uint32_t blocks = ceil_div(rows, 128), cols = ceil_div(n, kWideN);
    return blocks / 2 * cols + blocks % 2 * ceil_div(cols, 2);
  }
  return rows <= 64 ? (rows ? ceil_div(n, 4 * kDecodeN) : 0)
                    : ceil_div(rows, 128) * ceil_div(n, 2 * kNarrowN);
}

// In the output buffers, which the row stages do not need. One expert per math thread.
struct ScatterMemory {
  uint32_t seen[kMathWarps][kExperts];  // by warp; or [0]: by CTA, [1]: before this CTA
  uint32_t row0[kExperts];
  uint32_t pair[kCountPairs];  // of a small operation: expert << 16 | place of the warp's
  uint4 sums[kMathWarps];
  Epoch epoch;
  uint32_t flag;
};
static_assert(sizeof(ScatterMemory) <= 2 * kOutputBytes && kExperts <= kMathThreads);

// Experts of a thread's first `each` pairs, `pair(i)`; -1: not here, or no such pair.
template <class Pair>
__device__ __forceinline__ void load_experts(const Launch& p, const TileMessage& m,
                                             const Template& op, uint32_t each, Pair pair,
                                             int32_t (&expert)[kPairsEach]) {
  const uint32_t pairs = m.tokens() * kTopK;
  if (!m.merged()) {  // without a branch between the loads, so that all are in flight at once
#pragma unroll
    for (uint32_t i = 0; i < kPairsEach; ++i) {
      const bool any = i < each && pair(i) < pairs;
      expert[i] = any ? __ldcg(op.expert_ids + pair(i)) : -1;
    }
  } else {
    const Origins origins(p, m);
#pragma unroll
    for (uint32_t i = 0; i < kPairsEach; ++i) {
      expert[i] = -1;
      if (i >= each) continue;
      const Origin from = origins.find(pair(i) / kTopK);
      if (pair(i) < pairs)
        expert[i] = __ldcg(from.slot->expert_ids + from.token * kTopK + pair(i) % kTopK);
    }
  }
#pragma unroll
  for (uint32_t i = 0; i < kPairsEach; ++i)
    if (expert[i] >= static_cast<int32_t>(kExperts)) expert[i] = -1;  // wrong: harms no others
}

// Inclusive sums of four values over the math threads (one expert each).
__device__ __forceinline__ uint4 scan(uint4 v, uint4* scratch) {
  const uint32_t t = thread_index(), lane = t % 32;
#pragma unroll
  for (uint32_t step = 1; step < 32; step *= 2) {
    const uint4 o{__shfl_up_sync(~0u, v.x, step), __shfl_up_sync(~0u, v.y, step),
                  __shfl_up_sync(~0u, v.z, step), __shfl_up_sync(~0u, v.w, step)};
    if (lane >= step) v = {v.x + o.x, v.y + o.y, v.z + o.z, v.w + o.w};
  }
  if (lane == 31) scratch[t / 32] = v;
  sync_threads<kMathThreads>(1);
  for (uint32_t w = 0; w < t / 32; ++w)
    v = {v.x + scratch[w].x, v.y + scratch[w].y, v.z + scratch[w].z, v.w + scratch[w].w};
  return v;
}

// Rows of expert t -> sums up to it: rows (padded), tiles of GateUp and of Down, x_moe.
__device__ __forceinline__ uint4 place_experts(uint32_t rows, bool wide, uint4* scratch) {
  return scan({ceil_div(rows, 64) * 64, expert_tiles(rows, gemm_n(kGateUp), wide),
               expert_tiles(rows, gemm_n(kDown), wide), ceil_div(rows, wide ? 128 : 64)},
              scratch);
}

// All math threads of one CTA: tells the later stages, and the scheduler. True, in one thread: a
// check epoch is due.
__device__ __forceinline__ bool lay_out(State& s, const TileMessage& m, Groups& g, uint32_t rows,
                                        const uint4& end) {
  const uint32_t t = thread_index();
  if (t < kExperts) {
    g.rows[t] = rows;
    g.row0[t + 1] = end.x;
    g.tiles[kGateUp][t + 1] = end.y;
    g.tiles[kDown][t + 1] = end.z;
  }
  if (t == 0) g.row0[0] = g.tiles[kGateUp][0] = g.tiles[kDown][0] = 0;
  if (t != kExperts - 1) return false;
  Slot& slot = s.queue[m.tile.phase].slot[m.tile.slot];
  set_tiles(slot, kStageGateUp, end.y);
  set_tiles(slot, kStageDown, end.z);
  const uint32_t items = activate_items(m.tokens(), end.x);
  g.activate_items = items;
  set_tiles(slot, kActivate, end.w ? ceil_div(m.tokens() * kTopK, items * kWarpsPerCluster) : 0);
  return m.tile.phase == kDecode && set_demand_changes(s, slot, end.w);
}

// One thread has found that a check epoch is due: all math threads of its CTA announce it.
__device__ __forceinline__ void announce_if(State& s, bool due, ScatterMemory& mem) {
  const uint32_t t = thread_index();
  if (t == 0) mem.flag = 0;
  sync_threads<kMathThreads>(1);
  if (due) {
    mem.epoch = draw_epoch(s, global_ns());
    mem.flag = 1;
  }
  sync_threads<kMathThreads>(1);
  if (mem.flag) announce_epoch(s, mem.epoch, t, kMathThreads);
}

// Counting stage: each pair's place among its expert's rows; the last CTA to finish lays out rows
// and tiles.
__device__ __forceinline__ void count_tile(const Launch& p, const TileMessage& m,
                                           const Template& op, uint32_t rank, ScatterMemory& mem) {
  State& s = *p.state;
  const uint32_t t = thread_index(), pairs = m.tokens() * kTopK;
  uint32_t *seen = mem.seen[0], *base = mem.seen[1];
  for (uint32_t e = t; e < kExperts; e += kMathThreads) seen[e] = 0;
  sync_threads<kMathThreads>(1);
  const uint32_t first = (m.tile.ticket * kCluster + rank) * kCountPairs;
  int32_t expert[kPairsEach];
  uint32_t place[kPairsEach];
  load_experts(
      p, m, op, kPairsEach, [&](uint32_t i) { return first + i * kMathThreads + t; }, expert);
#pragma unroll
  for (uint32_t i = 0; i < kPairsEach; ++i)
    place[i] = expert[i] >= 0 ? atomicAdd(seen + expert[i], 1u) : 0;
  sync_threads<kMathThreads>(1);
  for (uint32_t e = t; e < kExperts; e += kMathThreads)
    base[e] = seen[e] ? atomicAdd(op.groups->counting + e, seen[e]) : 0;
  sync_threads<kMathThreads>(1);
#pragma unroll
  for (uint32_t i = 0; i < kPairsEach; ++i) {
    const uint32_t pair = first + i * kMathThreads + t;
    if (pair < pairs) op.position[pair] = expert[i] >= 0 ? base[expert[i]] + place[i] : kNoRow;
  }
  Groups& g = *op.groups;
  if (t == 0) {
    const Slot& slot = s.queue[m.tile.phase].slot[m.tile.slot];
    mem.flag = fetch_add(g.counted, 1u) + 1 == slot.op.tiles[kCount] * kCluster;
  }
  sync_threads<kMathThreads>(1);
  if (!mem.flag) return;
  const uint32_t rows = t < kExperts ? __ldcg(g.counting + t) : 0;
  const uint4 end = place_experts(rows, m.wide(), mem.sums);
  if (t < kExperts) g.counting[t] = 0;
  if (t == 0) g.counted = 0;
  announce_if(s, lay_out(s, m, g, rows, end), mem);
}

// This warp's pairs: rows of tokens and their scales to where `row_of(pair, origin)` says, which
// one lane each asks. A token is read once for all its experts here, while they are asked.
template <class RowOf>
__device__ __forceinline__ void copy_pairs(const Origins& origins, const TileMessage& m,
                                           const Template& op, uint32_t rank, RowOf row_of) {
  constexpr uint32_t kRowBytes = kHidden * kElementBytes, kChunks = kRowBytes / 16;
  constexpr uint32_t kRounds = ceil_div(kChunks, 32 * 8),  // of at most eight loads per lane
      kAtOnce = ceil_div(kChunks, 32 * kRounds);
  constexpr uint32_t kScales = kFp8 ? ceil_div(kHidden / 128, 32) : 0;
  const uint32_t lane = thread_index() % 32;
  uint32_t first, last;
  warp_range(m, rank, m.tokens() * kTopK, m.items(), first, last);
  while (first < last) {
    const uint32_t token = first / kTopK, end = min(last, (token + 1) * kTopK), pairs = end - first;
    const Origin from = origins.find(token);
    const uint4* src = reinterpret_cast<const uint4*>(from.slot->tokens +
                                                      static_cast<size_t>(from.token) * kRowBytes);
    uint4 v[kAtOnce];
    auto load = [&](uint32_t round) {
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        const uint32_t c = (round * kAtOnce + i) * 32 + lane;
        v[i] = uint4{};  // else its registers count as live in the GEMM's mainloop
        if (c < kChunks) v[i] = __ldcg(src + c);
      }
    };
    load(0);
    float scale[kScales + 1];
#pragma unroll
    for (uint32_t i = 0; i < kScales; ++i) {
      const uint32_t k = i * 32 + lane;
      scale[i] = 0;
      if (k < kHidden / 128)
        scale[i] = __ldcg(from.slot->token_scales + from.token * (kHidden / 128) + k);
    }
    uint32_t row = kNoRow;
    if (lane < pairs) {
      row = row_of(first + lane, from);
      op.row_of[first + lane] = row;
    }
    const uint32_t present = __ballot_sync(~0u, row != kNoRow);
#pragma unroll 1
    for (uint32_t round = 0; round < kRounds; ++round) {
      if (round) load(round);
      for (uint32_t p = present; p; p &= p - 1) {
        const uint32_t to = __shfl_sync(~0u, row, __ffs(p) - 1);
        uint4* dst = reinterpret_cast<uint4*>(op.rows + static_cast<size_t>(to) * kRowBytes);
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i) {
          const uint32_t c = (round * kAtOnce + i) * 32 + lane;
          if (c < kChunks) __stcg(dst + c, v[i]);
        }
        if (round) continue;
#pragma unroll
        for (uint32_t i = 0; i < kScales; ++i) {
          const uint32_t k = i * 32 + lane;
          if (k < kHidden / 128)
            op.row_scales[static_cast<size_t>(k) * op.row_capacity + to] = scale[i];
        }
      }
    }
    first = end;
  }
  fence_async_global();
}

// Copying stage of a large operation.
__device__ __forceinline__ void copy_tile(const Launch& p, const TileMessage& m, const Template& op,
                                          uint32_t rank) {
  copy_pairs(Origins(p, m), m, op, rank, [&](uint32_t pair, const Origin& from) {
    const uint32_t place = __ldcg(op.position + pair);
    const int32_t* expert = from.slot->expert_ids + from.token * kTopK + pair % kTopK;
    return place == kNoRow ? kNoRow : __ldcg(op.groups->row0 + __ldcg(expert)) + place;
  });
}

// The whole scatter of a small operation. Warp w has pairs [w, w + 1) * each * 32, in order, so
// places are the same in every CTA.
__device__ __forceinline__ void scatter_tile(const Launch& p, const TileMessage& m,
                                             const Template& op, uint32_t rank,
                                             ScatterMemory& mem) {
  const uint32_t t = thread_index(), lane = t % 32, warp = t / 32;
  const uint32_t pairs = m.tokens() * kTopK, each = ceil_div(pairs, kMathThreads);
  const uint32_t first = warp * each * 32;
  State& s = *p.state;
  int32_t expert[kPairsEach];
  load_experts(p, m, op, each, [&](uint32_t i) { return first + i * 32 + lane; }, expert);
  for (uint32_t e = lane; e < kExperts; e += 32) mem.seen[warp][e] = 0;
  __syncwarp();
#pragma unroll
  for (uint32_t i = 0; i < kPairsEach; ++i) {
    if (i >= each) break;
    const uint32_t alike = __match_any_sync(~0u, expert[i]), before = alike & ((1u << lane) - 1);
    uint32_t* seen = expert[i] >= 0 ? &mem.seen[warp][expert[i]] : nullptr;
    const uint32_t place = (seen ? *seen : 0) + __popc(before);
    __syncwarp();
    if (seen && before == 0) *seen += __popc(alike);
    __syncwarp();
    const uint32_t pair = first + i * 32 + lane;
    if (pair < pairs)
      mem.pair[pair] = seen ? static_cast<uint32_t>(expert[i]) << 16 | place : kNoRow;
  }
  sync_threads<kMathThreads>(1);
  uint32_t rows = 0;
  if (t < kExperts) {
#pragma unroll
    for (uint32_t w = 0; w < kMathWarps; ++w) {
      const uint32_t here = mem.seen[w][t];
      mem.seen[w][t] = rows;
      rows += here;
    }
  }
  const uint4 end = place_experts(rows, m.wide(), mem.sums);
  if (t < kExperts) mem.row0[t] = end.x - ceil_div(rows, 64) * 64;
  const bool tells = m.tile.ticket == 0 && rank == 0;
  const bool due = tells && lay_out(s, m, *op.groups, rows, end);
  sync_threads<kMathThreads>(1);
  copy_pairs(Origins(p, m), m, op, rank, [&](uint32_t pair, const Origin&) {
    const uint32_t at = mem.pair[pair], e = at >> 16;
    return at == kNoRow ? kNoRow : mem.row0[e] + mem.seen[pair / (each * 32)][e] + (at & 0xffff);
  });
  if (tells) announce_if(s, due, mem);
}

}  // namespace expertplex::apk
