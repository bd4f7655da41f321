// The row stages of a MoE operation, run by the math warps of both CTAs of a cluster: scatter
// (count, copy), SiLU(gate) * up + requantise, gather. They walk (token, expert) pairs, so padding
// rows cost nothing.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "gemm.cuh"
#include "operation.cuh"
#include "scheduler/scheduler.h"

namespace expertplex::apk {

constexpr uint32_t kNoRow = ~0u;

// Cluster tiles of one expert's rows, and x_moe's unit: see locate_tile() for the order.
__host__ __device__ constexpr uint32_t expert_tiles(uint32_t rows, uint32_t n, bool wide) {
  if (wide) {
    const uint32_t blocks = ceil_div(rows, 128), cols = ceil_div(n, kWideN);
    return blocks / 2 * cols + blocks % 2 * ceil_div(cols, 2);
  }
  return rows <= 64 ? (rows ? ceil_div(n, 4 * kDecodeN) : 0)
                    : ceil_div(rows, 128) * ceil_div(n, 2 * kNarrowN);
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

// Scatter, stage 1: each pair's place among its expert's rows; the last CTA to finish lays out rows
// and tiles.
__device__ __forceinline__ void count_tile(State& s, const TileMessage& m, const Template& op,
                                           uint32_t rank, uint32_t* scratch) {
  const uint32_t t = thread_index(), pairs = m.tokens() * kTopK;
  uint32_t *seen = scratch, *base = seen + kMathThreads, *flag = base + kMathThreads;
  uint4* sums = reinterpret_cast<uint4*>(flag + 4);
  Epoch* epoch = reinterpret_cast<Epoch*>(sums + kMathThreads / 32);
  for (uint32_t e = t; e < kExperts; e += kMathThreads) seen[e] = 0;
  sync_threads<kMathThreads>(1);
  const uint32_t first = (m.tile.ticket * kCluster + rank) * kCountPairs;
  constexpr uint32_t kEach = kCountPairs / kMathThreads;
  int32_t expert[kEach];
  uint32_t place[kEach];
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i) {
    const uint32_t pair = first + i * kMathThreads + t;
    expert[i] = pair < pairs ? __ldcg(op.expert_ids + pair) : -1;
    if (expert[i] >= static_cast<int32_t>(kExperts)) expert[i] = -1;  // wrong: harms no others
  }
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i)
    place[i] = expert[i] >= 0 ? atomicAdd(seen + expert[i], 1u) : 0;
  sync_threads<kMathThreads>(1);
  for (uint32_t e = t; e < kExperts; e += kMathThreads)
    base[e] = seen[e] ? atomicAdd(op.groups->counting + e, seen[e]) : 0;
  sync_threads<kMathThreads>(1);
#pragma unroll
  for (uint32_t i = 0; i < kEach; ++i) {
    const uint32_t pair = first + i * kMathThreads + t;
    if (pair < pairs) op.position[pair] = expert[i] >= 0 ? base[expert[i]] + place[i] : kNoRow;
  }
  if (t == 0) {
    Slot& slot = s.queue[m.tile.phase].slot[m.tile.slot];
    *flag = fetch_add(op.groups->counted, 1u) + 1 == slot.op.tiles[kCount] * kCluster;
  }
  sync_threads<kMathThreads>(1);
  if (!*flag) return;

  Groups& g = *op.groups;
  const bool wide = m.wide();
  const uint32_t rows = t < kExperts ? __ldcg(g.counting + t) : 0;
  const uint4 end = scan({ceil_div(rows, 64) * 64, expert_tiles(rows, gemm_n(kGateUp), wide),
                          expert_tiles(rows, gemm_n(kDown), wide), ceil_div(rows, wide ? 128 : 64)},
                         sums);
  if (t < kExperts) {
    g.counting[t] = 0;
    g.rows[t] = rows;
    g.row0[t + 1] = end.x;
    g.tiles[kGateUp][t + 1] = end.y;
    g.tiles[kDown][t + 1] = end.z;
  }
  if (t == 0) g.row0[0] = g.tiles[kGateUp][0] = g.tiles[kDown][0] = g.counted = 0;
  if (t == kExperts - 1) {
    Slot& slot = s.queue[m.tile.phase].slot[m.tile.slot];
    set_tiles(slot, kStageGateUp, end.y);
    set_tiles(slot, kStageDown, end.z);
    if (end.w == 0) set_tiles(slot, kActivate, 0);
    *flag = m.tile.phase == kDecode && end.w != slot.op.x_moe;  // decode's share of the SMs changes
    if (*flag) {
      fetch_add(s.demand, end.w - slot.op.x_moe);
      slot.op.x_moe = end.w;
      *epoch = draw_epoch(s, global_ns());
    }
  }
  sync_threads<kMathThreads>(1);
  if (*flag) announce(s, *epoch, t, kMathThreads);
}

// Items [first, last) of this warp, of `total` in the stage.
template <Stage kStage>
__device__ __forceinline__ void warp_range(const TileMessage& m, uint32_t rank, uint32_t total,
                                           uint32_t& first, uint32_t& last) {
  const uint32_t each = items_per_warp(kStage, m.tokens());
  const uint32_t warp = (m.tile.ticket * kCluster + rank) * (kMathThreads / 32);
  first = min(total, (warp + thread_index() / 32) * each);
  last = min(total, first + each);
}

// Scatter, stage 2: token rows and their scales into expert order. A token is read once for all its
// experts here.
template <class Halfway>
__device__ __forceinline__ void copy_tile(const TileMessage& m, const Template& op, uint32_t rank,
                                          Halfway halfway) {
  constexpr uint32_t kRowBytes = kHidden * kElementBytes, kChunks = kRowBytes / 16;
  const uint32_t lane = thread_index() % 32;
  uint32_t first, last;
  warp_range<kCopy>(m, rank, m.tokens() * kTopK, first, last);
  halfway();
  while (first < last) {
    const uint32_t token = first / kTopK, end = min(last, (token + 1) * kTopK), pairs = end - first;
    uint32_t row = kNoRow;
    if (lane < pairs) {
      const uint32_t place = __ldcg(op.position + first + lane);
      if (place != kNoRow)
        row = __ldcg(op.groups->row0 + __ldcg(op.expert_ids + first + lane)) + place;
      op.row_of[first + lane] = row;
    }
    const uint32_t present = __ballot_sync(~0u, row != kNoRow);
    if (present) {
      const uint4* src =
          reinterpret_cast<const uint4*>(op.tokens + static_cast<size_t>(token) * kRowBytes);
      for (uint32_t c = lane; c < ceil_div(kChunks, 128) * 128; c += 128) {
        uint4 v[4];
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i)
          if (c + i * 32 < kChunks) v[i] = __ldcg(src + c + i * 32);
        for (uint32_t p = present; p; p &= p - 1) {
          const uint32_t to = __shfl_sync(~0u, row, __ffs(p) - 1);
          uint4* dst = reinterpret_cast<uint4*>(op.rows + static_cast<size_t>(to) * kRowBytes);
#pragma unroll
          for (uint32_t i = 0; i < 4; ++i)
            if (c + i * 32 < kChunks) __stcg(dst + c + i * 32, v[i]);
        }
      }
      if constexpr (kFp8) {
        for (uint32_t k = lane; k < ceil_div(kHidden / 128, 32) * 32; k += 32) {
          const float scale =
              k < kHidden / 128 ? __ldcg(op.token_scales + token * (kHidden / 128) + k) : 0;
          for (uint32_t p = present; p; p &= p - 1) {
            const uint32_t to = __shfl_sync(~0u, row, __ffs(p) - 1);
            if (k < kHidden / 128)
              op.row_scales[static_cast<size_t>(k) * op.row_capacity + to] = scale;
          }
        }
      }
    }
    first = end;
  }
  fence_async_global();
}

// SiLU(gate) * up, then FP8 with one scale per 128 columns: half a warp per 128 columns, 8 columns
// a lane. Up to 2,048 columns of a row are loaded before the first is used: the stage is as fast as
// its loads are many.
template <class Halfway>
__device__ __forceinline__ void activate_tile(const TileMessage& m, const Template& op,
                                              uint32_t rank, Halfway halfway) {
  constexpr uint32_t kSteps = ceil_div(kIntermediate, 256), kAtOnce = kSteps < 8 ? kSteps : 8;
  const uint32_t lane = thread_index() % 32;
  uint32_t first, last;
  warp_range<kActivate>(m, rank, m.tokens() * kTopK, first, last);
  const uint32_t rows =
      first + lane < last ? __ldcg(op.row_of + first + lane) : kNoRow;  // at most 32 items
  halfway();
  for (uint32_t i = 0; i < last - first; ++i) {
    const uint32_t row = __shfl_sync(~0u, rows, i);
    if (row == kNoRow) continue;
    const __nv_bfloat16* gate =
        static_cast<const __nv_bfloat16*>(op.hidden) + static_cast<size_t>(row) * 2 * kIntermediate;
#pragma unroll 1
    for (uint32_t base = lane * 8; base < kSteps * 256; base += kAtOnce * 256) {
      uint4 g[kAtOnce], u[kAtOnce];
#pragma unroll
      for (uint32_t j = 0; j < kAtOnce; ++j) {
        const uint32_t c = base + j * 256;
        g[j] = u[j] = uint4{};
        if (c < kIntermediate) {
          g[j] = __ldcg(reinterpret_cast<const uint4*>(gate + c));
          u[j] = __ldcg(reinterpret_cast<const uint4*>(gate + kIntermediate + c));
        }
      }
#pragma unroll
      for (uint32_t j = 0; j < kAtOnce; ++j) {
        const uint32_t c = base + j * 256;
        const bool in = c < kIntermediate;
        const auto* g2 = reinterpret_cast<const __nv_bfloat162*>(&g[j]);
        const auto* u2 = reinterpret_cast<const __nv_bfloat162*>(&u[j]);
        float y[8], largest = 1e-10f;
#pragma unroll
        for (uint32_t n = 0; n < 4; ++n) {
          const float2 a = __bfloat1622float2(g2[n]), b = __bfloat1622float2(u2[n]);
          y[2 * n] = __fdividef(a.x, 1.0f + __expf(-a.x)) * b.x;
          y[2 * n + 1] = __fdividef(a.y, 1.0f + __expf(-a.y)) * b.y;
          largest = fmaxf(largest, fmaxf(fabsf(y[2 * n]), fabsf(y[2 * n + 1])));
        }
        if constexpr (kFp8) {
#pragma unroll
          for (uint32_t step = 8; step; step /= 2)
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
          const float inverse = __fdividef(448.0f, largest);
          uint16_t q[4];
#pragma unroll
          for (uint32_t n = 0; n < 4; ++n)
            q[n] = __nv_cvt_float2_to_fp8x2({y[2 * n] * inverse, y[2 * n + 1] * inverse},
                                            __NV_SATFINITE, __NV_E4M3);
          if (!in) continue;
          const uint2 v{q[0] | static_cast<uint32_t>(q[1]) << 16, q[2] | static_cast<uint32_t>(q[3])
                                                                             << 16};
          __stcg(reinterpret_cast<uint2*>(op.act + static_cast<size_t>(row) * kIntermediate + c),
                 v);
          if (lane % 16 == 0)
            op.act_scales[static_cast<size_t>(c / 128) * op.row_capacity + row] =
                largest * (1.0f / 448.0f);
        } else if (in) {
          __nv_bfloat162 v[4];
#pragma unroll
          for (uint32_t n = 0; n < 4; ++n) v[n] = __float22bfloat162_rn({y[2 * n], y[2 * n + 1]});
          __stcg(
              reinterpret_cast<uint4*>(op.act + (static_cast<size_t>(row) * kIntermediate + c) * 2),
              *reinterpret_cast<uint4*>(v));
        }
      }
    }
  }
  fence_async_global();
}

// Weighted sum of a token's expert rows in fp32, rounded once to bf16. A warp takes 512 columns of
// a token at a time.
template <class Halfway>
__device__ __forceinline__ void gather_tile(const TileMessage& m, const Template& op, uint32_t rank,
                                            Halfway halfway) {
  const uint32_t lane = thread_index() % 32;
  uint32_t first, last;
  warp_range<kGather>(m, rank, m.tokens() * kGatherSlices, first, last);
  halfway();
  uint32_t known = kNoRow, row = kNoRow;
  float weight = 0;
  for (; first < last; ++first) {
    const uint32_t token = first / kGatherSlices,
                   begin = first % kGatherSlices * kGatherColumns + lane * 8;
    if (token != known && lane < kTopK) {
      row = __ldcg(op.row_of + token * kTopK + lane);
      weight = __ldcg(op.expert_weights + token * kTopK + lane);
    }
    known = token;
    const __nv_bfloat16* down = static_cast<const __nv_bfloat16*>(op.down);
    uint4 v[2][kTopK];  // all loads in flight before the first use
#pragma unroll
    for (uint32_t k = 0; k < kTopK; ++k) {
      const uint32_t from = __shfl_sync(~0u, row, k);
#pragma unroll
      for (uint32_t j = 0; j < 2; ++j) {
        v[j][k] = uint4{};
        if (from != kNoRow && begin + j * 256 < kHidden)
          v[j][k] = __ldcg(reinterpret_cast<const uint4*>(
              down + static_cast<size_t>(from) * kHidden + begin + j * 256));
      }
    }
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
      const uint32_t c = begin + j * 256;
      float sum[8] = {};
#pragma unroll
      for (uint32_t k = 0; k < kTopK; ++k) {
        const float w = __shfl_sync(~0u, weight, k);
        const auto* v2 = reinterpret_cast<const __nv_bfloat162*>(&v[j][k]);
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
          const float2 f = __bfloat1622float2(v2[i]);
          sum[2 * i] += w * f.x;
          sum[2 * i + 1] += w * f.y;
        }
      }
      __nv_bfloat162 out[4];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) out[i] = __float22bfloat162_rn({sum[2 * i], sum[2 * i + 1]});
      if (c < kHidden)
        __stcg(reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(op.result) +
                                        static_cast<size_t>(token) * kHidden + c),
               *reinterpret_cast<uint4*>(out));
    }
  }
}

}  // namespace expertplex::apk
