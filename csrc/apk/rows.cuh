// The row stages after the scatter, run by the math warps of both CTAs of a cluster: SiLU(gate) *
// up
// + requantise, gather. They walk (token, expert) pairs, so padding rows cost nothing.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "gemm.cuh"
#include "members.cuh"
#include "scheduler/scheduler.h"

namespace expertplex::apk {

constexpr uint32_t kNoRow = ~0u;

// Items [first, last) of this warp, of `total` in the stage, where each warp takes `each` per tile.
__device__ __forceinline__ void warp_range(const TileMessage& m, uint32_t rank, uint32_t total,
                                           uint32_t each, uint32_t& first, uint32_t& last) {
  const uint32_t warp = (m.tile.ticket * kCluster + rank) * (kMathThreads / 32);
  first = min(total, (warp + thread_index() / 32) * each);
  last = min(total, first + each);
}

// Units [0, n): the next one's loads are in flight while one is used. A row stage is as fast as its
// loads are many: they must not depend on a condition, for which ptxas makes each wait for the one
// before. Two units ahead, in three times the code, were slower.
template <class Buffer, class Load, class Use>
__device__ __forceinline__ void overlap(uint32_t n, Load load, Use use) {
  if (n == 0) return;
  Buffer next;
  load(0, next);
#pragma unroll 1
  for (uint32_t i = 0; i < n; ++i) {
    const Buffer now = next;
    if (i + 1 < n) load(i + 1, next);
    use(i, now);
  }
}

__device__ __forceinline__ float silu(float x) {
  float e, r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * -1.442695041f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + e));
  return x * r;
}

// SiLU(gate) * up, then FP8 with one scale per 128 columns: half a warp per 128 columns, 8 columns
// a lane. A unit is up to 1,024 columns of a row.
__device__ __forceinline__ void activate_tile(const TileMessage& m, const Template& op,
                                              uint32_t rank) {
  constexpr uint32_t kSteps = ceil_div(kIntermediate, 256), kUnits = ceil_div(kSteps, 4),
                     kAtOnce = ceil_div(kSteps, kUnits);
  const uint32_t lane = thread_index() % 32;
  uint32_t first, last;
  warp_range(m, rank, m.tokens() * kTopK, m.items(), first, last);
  uint32_t rows = first + lane < last ? __ldcg(op.row_of + first + lane) : kNoRow;
  const uint32_t here = __ballot_sync(~0u, rows != kNoRow);
  uint32_t left = here;
  for (uint32_t i = 0; i < lane; ++i) left &= left - 1;
  rows = __shfl_sync(~0u, rows, __ffs(left) - 1);  // lane i: the i-th that is here
  struct Values {
    uint4 gate[kAtOnce], up[kAtOnce];
  };
  auto load = [&](uint32_t unit, Values& v) __attribute__((always_inline)) {
    const uint32_t row = __shfl_sync(~0u, rows, unit / kUnits);
    const __nv_bfloat16* gate =
        static_cast<const __nv_bfloat16*>(op.hidden) + static_cast<size_t>(row) * 2 * kIntermediate;
#pragma unroll
    for (uint32_t j = 0; j < kAtOnce; ++j) {
      const uint32_t c = (unit % kUnits * kAtOnce + j) * 256 + lane * 8;
      const __nv_bfloat16* at = gate + min(c, kIntermediate - 8);
      v.gate[j] = __ldcg(reinterpret_cast<const uint4*>(at));
      v.up[j] = __ldcg(reinterpret_cast<const uint4*>(at + kIntermediate));
    }
  };
  auto use = [&](uint32_t unit, const Values& v) __attribute__((always_inline)) {
    const uint32_t row = __shfl_sync(~0u, rows, unit / kUnits);
#pragma unroll
    for (uint32_t j = 0; j < kAtOnce; ++j) {
      const uint32_t c = (unit % kUnits * kAtOnce + j) * 256 + lane * 8;
      const bool in = c < kIntermediate;
      const auto* g2 = reinterpret_cast<const __nv_bfloat162*>(&v.gate[j]);
      const auto* u2 = reinterpret_cast<const __nv_bfloat162*>(&v.up[j]);
      float y[8], largest = 1e-10f;
#pragma unroll
      for (uint32_t n = 0; n < 4; ++n) {
        const float2 a = __bfloat1622float2(g2[n]), b = __bfloat1622float2(u2[n]);
        y[2 * n] = silu(a.x) * b.x;
        y[2 * n + 1] = silu(a.y) * b.y;
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
        const uint2 out{q[0] | static_cast<uint32_t>(q[1]) << 16, q[2] | static_cast<uint32_t>(q[3])
                                                                             << 16};
        __stcg(reinterpret_cast<uint2*>(op.act + static_cast<size_t>(row) * kIntermediate + c),
               out);
        if (lane % 16 == 0)
          op.act_scales[static_cast<size_t>(c / 128) * op.row_capacity + row] =
              largest * (1.0f / 448.0f);
      } else if (in) {
        __nv_bfloat162 out[4];
#pragma unroll
        for (uint32_t n = 0; n < 4; ++n) out[n] = __float22bfloat162_rn({y[2 * n], y[2 * n + 1]});
        __stcg(
            reinterpret_cast<uint4*>(op.act + (static_cast<size_t>(row) * kIntermediate + c) * 2),
            *reinterpret_cast<uint4*>(out));
      }
    }
  };
  overlap<Values>(__popc(here) * kUnits, load, use);
  fence_async_global();
}

// Weighted sum of a token's expert rows in fp32, rounded once to bf16. A unit is a slice of a
// token's columns; lane o * kTopK + k has what the o-th token of this warp needs of its k-th
// expert.
__device__ __forceinline__ void gather_tile(const Launch& p, const TileMessage& m,
                                            const Template& op, uint32_t rank) {
  constexpr uint32_t kLoads = kGatherColumns / 256;
  const uint32_t lane = thread_index() % 32;
  uint32_t first, last;
  warp_range(m, rank, m.tokens() * kGatherSlices, m.items(), first, last);
  const uint32_t token0 = first / kGatherSlices, entry = token0 * kTopK + lane;
  const bool mine = lane < 32 / kTopK * kTopK && entry < m.tokens() * kTopK;
  const uint32_t rows = mine ? __ldcg(op.row_of + entry) : kNoRow;
  const Origins origins(p, m);
  const Origin from = origins.find(entry / kTopK);
  const float weights =
      mine ? __ldcg(from.slot->expert_weights + from.token * kTopK + entry % kTopK) : 0;
  struct Values {
    uint4 v[kLoads][kTopK];
  };
  auto load = [&](uint32_t unit, Values& to) __attribute__((always_inline)) {
    const uint32_t item = first + unit, from = (item / kGatherSlices - token0) * kTopK;
    const uint32_t begin = item % kGatherSlices * kGatherColumns + lane * 8;
    const __nv_bfloat16* down = static_cast<const __nv_bfloat16*>(op.down);
#pragma unroll
    for (uint32_t k = 0; k < kTopK; ++k) {
      const uint32_t row = __shfl_sync(~0u, rows, from + k);
      const __nv_bfloat16* of = down + static_cast<size_t>(row == kNoRow ? 0 : row) * kHidden;
#pragma unroll
      for (uint32_t j = 0; j < kLoads; ++j)
        to.v[j][k] = __ldcg(reinterpret_cast<const uint4*>(of + min(begin + j * 256, kHidden - 8)));
    }
  };
  auto use = [&](uint32_t unit, const Values& from) __attribute__((always_inline)) {
    const uint32_t item = first + unit, token = item / kGatherSlices;
    const Origin to = origins.find(token);
    const uint32_t begin = item % kGatherSlices * kGatherColumns + lane * 8;
#pragma unroll
    for (uint32_t j = 0; j < kLoads; ++j) {
      float sum[8] = {};
#pragma unroll
      for (uint32_t k = 0; k < kTopK; ++k) {
        const float w = __shfl_sync(~0u, weights, (token - token0) * kTopK + k);
        if (__shfl_sync(~0u, rows, (token - token0) * kTopK + k) == kNoRow) continue;
        const auto* v2 = reinterpret_cast<const __nv_bfloat162*>(&from.v[j][k]);
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
      const uint32_t c = begin + j * 256;
      if (c < kHidden)
        __stcg(reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(to.slot->result) +
                                        static_cast<size_t>(to.token) * kHidden + c),
               *reinterpret_cast<uint4*>(out));
    }
  };
  overlap<Values>(last - first, load, use);
}

}  // namespace expertplex::apk
