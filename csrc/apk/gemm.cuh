// Block-scaled FP8 (or BF16) grouped GEMM on one CTA: the TMA side, the math side, the output side.
//
// The three run in different warps and meet at the pipeline's stages. Numerics follow DeepGEMM's
// 1D2D scheme: 128-wide K blocks are summed by the tensor cores, then promoted into fp32 by the
// activation row's and the weight block's scale. Nothing here knows where tiles come from.
#pragma once

#include <cuda_bf16.h>

#include <cute/arch/copy_sm90_tma.hpp>
#include <deep_gemm/mma/sm90.cuh>
#include <deep_gemm/ptx/wgmma.cuh>

#include "layout.cuh"
#include "sync.cuh"

namespace expertplex::apk {

struct alignas(1024) GemmMemory {
  uint8_t output[2][kOutputBytes];  // per warpgroup; also scratch of the row stages
  uint8_t stage[kStages][kStageBytes];
  float row_scales[kStages][kStageRowsA];
  float weight_scales[2][2 * kMaxKBlocks];  // per slot of the tile ring: K/128 pairs, of two rows
                                            // of scales
  Barrier full[kStages], empty[kStages];
  Barrier scales_full[2];
};

struct PipelineState {
  uint32_t stage = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    stage = stage + 1 == kStages ? 0 : stage + 1;
    parity ^= stage == 0;
  }
};

__device__ __forceinline__ uint32_t weight_offset(uint32_t shape) {
  return shape == kStackCols ? 8192 : 16384;
}

// Bytes of weights that a cluster reads for a tile; `m` is its first CTA's.
__device__ __forceinline__ uint32_t weight_bytes(const TileMessage& m) {
  const uint32_t gemm = m.tile.stage == kStageDown ? kDown : kGateUp, shape = m.shape();
  const uint32_t cta = shape <= kPairCols ? kWideN : shape == kStackRows ? kNarrowN : 2 * kDecodeN;
  const uint32_t columns = min(shape == kPairRows ? cta : 2 * cta, gemm_n(gemm) - m.col);
  return columns * gemm_k_blocks(gemm) * 128;
}

// Called by one whole warp. `on_block(k)` runs before K block k is loaded (the tile's claim-ahead
// mark).
template <class OnBlock>
__device__ __forceinline__ void load_tile(GemmMemory& mem, PipelineState& pipe,
                                          const TileMessage& m, uint32_t ring_slot, uint32_t rank,
                                          const Template& op, const Layer& layer,
                                          const uint64_t* deadline, OnBlock on_block) {
  const uint32_t gemm = m.tile.stage == kStageDown ? kDown : kGateUp;
  const uint32_t n = gemm_n(gemm), k_blocks = gemm_k_blocks(gemm), shape = m.shape(),
                 lane = thread_index() % 32;
  fence_async_global();  // rows written by ordinary stores are read by TMA from here on

  const bool tall = shape != kStackCols, wide = shape <= kPairCols;
  // Products of rows that are not loaded are of whatever stands there, and nobody reads them.
  const bool few = !tall && m.rows() <= kFewRows;
  const uint32_t box = tall ? 0 : few ? 2 : 1, rows = tall ? 128 : few ? kFewRows : 64;
  const void* map_a = &op.a[gemm][box];
  const void* map_sfa = &op.sfa[gemm][box];
  const void* map_b = wide ? &layer.wide[gemm] : &layer.narrow[gemm];
  const uint32_t weight_row = m.expert() * n + m.col;
  const uint32_t bytes = rows * (128u + (kFp8 ? 4u : 0u)) + (wide   ? kWideN * 128u
                                                             : tall ? 16384u
                                                                    : 2 * kDecodeN * 128u);
  constexpr uint64_t kNormal = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  const uint64_t weight_hint =
      tall ? kNormal : static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST);
  const bool any = m.rows() != 0;
  for (uint32_t k = 0; k < k_blocks; ++k, pipe.advance()) {
    mem.empty[pipe.stage].wait(pipe.parity ^ 1, deadline);
    on_block(k);
    if (cute::elect_one_sync()) {
      auto* full = reinterpret_cast<uint64_t*>(&mem.full[pipe.stage]);
      uint8_t* a = mem.stage[pipe.stage];
      uint8_t* b = a + weight_offset(shape);
      const int32_t kc = k * kBlockK;
      if (any) {
        using Load = cute::SM90_TMA_LOAD_2D;
        using Multicast = cute::SM90_TMA_LOAD_MULTICAST_2D;
        Load::copy(map_a, full, kNormal, a, kc, m.row);
        if constexpr (kFp8)
          Load::copy(map_sfa, full, kNormal, mem.row_scales[pipe.stage], m.row, k);
        if (wide) {
          constexpr uint32_t kHalf = kWideN / 2;
          if (shape == kPairRows && kMulticast == 2) {
            Multicast::copy(map_b, full, 3, kNormal, b + rank * kHalf * 128, kc,
                            weight_row + rank * kHalf);
          } else if (shape == kPairRows && kMulticast == 1) {
            if (rank == 0) Multicast::copy(map_b, full, 3, kNormal, b, kc, weight_row);
          } else if constexpr (kMulticast == 2) {
            Load::copy(map_b, full, kNormal, b, kc, weight_row);
            Load::copy(map_b, full, kNormal, b + kHalf * 128, kc, weight_row + kHalf);
          } else {
            Load::copy(map_b, full, kNormal, b, kc, weight_row);
          }
        } else {
          Load::copy(map_b, full, weight_hint, b, kc, weight_row);
          if (!tall && kDecodeN == 128)
            Load::copy(map_b, full, weight_hint, b + 16384, kc, weight_row + 128);
        }
        mem.full[pipe.stage].arrive_expect(bytes);
      } else {
        mem.full[pipe.stage].arrive();
      }
    }
    __syncwarp();
    if (kFp8 && k == 0) {
      const uint32_t blocks = n / 128, first = m.col / 128;
      const float* scales =
          layer.scales[gemm] + static_cast<size_t>(m.expert()) * blocks * k_blocks;
      const float* row0 = scales + min(first, blocks - 1) * k_blocks;
      const float* row1 = scales + min(first + 1, blocks - 1) * k_blocks;
      float* dst = mem.weight_scales[ring_slot];
      for (uint32_t i = lane; i < 2 * k_blocks; i += 32) {
        const float* src = (i % 2 ? row1 : row0) + i / 2;
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem_addr(dst + i)), "l"(src)
                     : "memory");
      }
      mem.scales_full[ring_slot].arrive_after_copies();
    }
  }
}

// One warpgroup's 64 x kN product. `sfb`: pairs of weight scales, one pair per K block; tiles wider
// than 128 columns use both, the middle 64 columns the first if `middle_first`. Every thread ends
// with kN/2 fp32 sums in the WGMMA register layout.
template <uint32_t kN, uint32_t kBlocks>
__device__ __forceinline__ void multiply(GemmMemory& mem, PipelineState& pipe, float (&sum)[kN / 2],
                                         uint32_t a_offset, uint32_t b_offset, uint32_t scale_row,
                                         const float* sfb, bool middle_first,
                                         const uint64_t* deadline) {
  using namespace deep_gemm;
  const uint32_t lane = thread_index() % 32;
  auto base = mma::sm90::make_smem_desc(mem.stage[0], 1);
  const uint32_t low = __shfl_sync(~0u, base.reg32_[0], 0);
  auto a = base, b = base;
#pragma unroll
  for (uint32_t i = 0; i < kN / 2; ++i) sum[i] = 0.0f;
  auto product = [&](float* acc, bool keep) {
    const uint32_t at = low + pipe.stage * (kStageBytes / 16);
#pragma unroll
    for (uint32_t i = 0; i < kN / 2; ++i) ptx::warpgroup_fence_operand(acc[i]);
    ptx::warpgroup_arrive();
#pragma unroll
    for (uint32_t kk = 0; kk < 4; ++kk) {
      a.reg32_[0] = at + a_offset / 16 + kk * 2;
      b.reg32_[0] = at + b_offset / 16 + kk * 2;
      if constexpr (kFp8)
        mma::sm90::FP8MMASelector<kN>::type::wgmma(a, b, acc, keep || kk);
      else
        mma::sm90::BF16MMASelector<kN>::type::wgmma(a, b, acc, keep || kk);
    }
    ptx::warpgroup_commit_batch();
#pragma unroll
    for (uint32_t i = 0; i < kN / 2; ++i) ptx::warpgroup_fence_operand(acc[i]);
    ptx::warpgroup_wait<0>();
    if (lane < kCluster)
      mem.empty[pipe.stage].arrive_at(lane);  // both CTAs: a multicast needs both stages free
  };
  if constexpr (kFp8) {
    float acc[kN / 2];
#pragma unroll kUnroll
    for (uint32_t k = 0; k < kBlocks; ++k, pipe.advance()) {
      const float2 b =
          kN > 128 ? *reinterpret_cast<const float2*>(sfb + 2 * k) : float2{sfb[2 * k], 0.0f};
      mem.full[pipe.stage].wait_or_abort(pipe.parity, deadline);
      const float a0 = mem.row_scales[pipe.stage][scale_row],
                  a1 = mem.row_scales[pipe.stage][scale_row + 8];
      product(acc, false);
#pragma unroll
      for (uint32_t third = 0; third < (kN > 128 ? 3 : 1); ++third) {
        const float scale = third == 0 ? b.x : third == 2 ? b.y : middle_first ? b.x : b.y;
        const float s0 = a0 * scale, s1 = a1 * scale;
#pragma unroll
        for (uint32_t j = 0; j < (kN > 128 ? 8 : kN / 8); ++j) {
          const uint32_t i = 4 * (third * 8 + j);
          sum[i] += s0 * acc[i];
          sum[i + 1] += s0 * acc[i + 1];
          sum[i + 2] += s1 * acc[i + 2];
          sum[i + 3] += s1 * acc[i + 3];
        }
      }
    }
  } else {
#pragma unroll 2
    for (uint32_t k = 0; k < kBlocks; ++k, pipe.advance()) {
      mem.full[pipe.stage].wait_or_abort(pipe.parity, deadline);
      product(sum, k != 0);
    }
  }
}

// A warpgroup without rows of its own still hands every stage back.
__device__ __forceinline__ void skip(GemmMemory& mem, PipelineState& pipe, uint32_t k_blocks,
                                     const uint64_t* deadline) {
  for (uint32_t k = 0; k < k_blocks; ++k, pipe.advance()) {
    mem.full[pipe.stage].wait_or_abort(pipe.parity, deadline);
    if (thread_index() % 32 < kCluster) mem.empty[pipe.stage].arrive_at(thread_index() % 32);
  }
}

// bf16 into 64x64 boxes of 128-byte swizzled rows, as the output's TMA descriptor expects them.
template <uint32_t kN>
__device__ __forceinline__ void write_output(uint8_t* output, const float (&sum)[kN / 2]) {
  const uint32_t lane = thread_index() % 32, warp = thread_index() / 32 % 4;
  const uint32_t row = lane % 8 + lane / 8 % 2 * 8;
  auto pack = [](float x, float y) {
    const __nv_bfloat162 v = __float22bfloat162_rn({x, y});
    return *reinterpret_cast<const uint32_t*>(&v);
  };
#pragma unroll
  for (uint32_t i = 0; i < kN / 8;
       i += 2) {  // 16 columns: matrices (rows 0-7, 8-15) x (columns 0-7, 8-15)
    const uint32_t chunk = i % 8 + lane / 16;
    const uint32_t dst =
        smem_addr(output + i / 8 * 8192 + warp * 2048 + row * 128 + (chunk ^ row % 8) * 16);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(dst),
                 "r"(pack(sum[4 * i], sum[4 * i + 1])), "r"(pack(sum[4 * i + 2], sum[4 * i + 3])),
                 "r"(pack(sum[4 * i + 4], sum[4 * i + 5])),
                 "r"(pack(sum[4 * i + 6], sum[4 * i + 7]))
                 : "memory");
  }
}

// The math warps' part of a GEMM tile, up to and including its output in shared memory.
// `before_output` waits until the output buffer of this warpgroup is free.
template <uint32_t kGemm, class BeforeOutput>
__device__ __forceinline__ void multiply_tile(GemmMemory& mem, PipelineState& pipe,
                                              const TileMessage& m, const float* sfb,
                                              const uint64_t* deadline,
                                              BeforeOutput before_output) {
  constexpr uint32_t kBlocks = gemm_k_blocks(kGemm);
  const uint32_t shape = m.shape(), group = __shfl_sync(~0u, thread_index() / 128, 0);
  const uint32_t scale_row = thread_index() % 128 / 32 * 16 + thread_index() % 32 / 4;
  const bool cols = shape == kStackCols;
  const bool mine =
      cols ? m.rows() != 0 && m.col + group * kDecodeN < gemm_n(kGemm) : m.rows() > group * 64;
  if (!mine) {
    skip(mem, pipe, kBlocks, deadline);
    before_output();
  } else if (shape <= kPairCols) {
    float sum[kWideN / 2];
    multiply<kWideN, kBlocks>(mem, pipe, sum, group * 8192, 16384, group * 64 + scale_row, sfb,
                              m.col % 128 == 0, deadline);
    before_output();
    write_output<kWideN>(mem.output[group], sum);
  } else if (cols) {
    float sum[kDecodeN / 2];
    const float* scales = kDecodeN == 128 && group ? sfb + 1 : sfb;
    multiply<kDecodeN, kBlocks>(mem, pipe, sum, 0, 8192 + group * kDecodeN * 128, scale_row, scales,
                                true, deadline);
    before_output();
    write_output<kDecodeN>(mem.output[group], sum);
  } else {
    float sum[kNarrowN / 2];
    multiply<kNarrowN, kBlocks>(mem, pipe, sum, group * 8192, 16384, group * 64 + scale_row, sfb,
                                true, deadline);
    before_output();
    write_output<kNarrowN>(mem.output[group], sum);
  }
  fence_async_shared();
}

// One thread: starts the TMA stores of one warpgroup's output. The caller commits and waits.
__device__ __forceinline__ void store_output(GemmMemory& mem, const TileMessage& m, uint32_t group,
                                             const Template& op) {
  const uint32_t gemm = m.tile.stage == kStageDown ? kDown : kGateUp, n = gemm_n(gemm);
  const bool cols = m.shape() == kStackCols;
  const uint32_t row = m.row + (cols ? 0 : group * 64), col = m.col + (cols ? group * kDecodeN : 0);
  if (m.rows() == 0 || (!cols && m.rows() <= group * 64)) return;
  const uint32_t width = m.shape() <= kPairCols ? kWideN : cols ? kDecodeN : kNarrowN;
  const bool few = cols && m.rows() <= kFewRows;
  for (uint32_t i = 0; i < width && col + i < n; i += 64)
    cute::SM90_TMA_STORE_2D::copy(&op.out[gemm][few], mem.output[group] + i / 64 * 8192, col + i,
                                  row);
}

}  // namespace expertplex::apk
