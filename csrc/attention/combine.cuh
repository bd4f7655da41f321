// WaitDone and combine: wait for every MoE server's done word, then pull one partial sum per token
// and server, and add them in fp32, rounded once.
#pragma once

#include <cuda_bf16.h>

#include "attention/memory.cuh"
#include "attention/slot.cuh"

namespace expertplex::attention {

// Thread z waits for MoE server z; returns at once once any server has been lost. One that misses
// the deadline is reported to the host, and the kernel goes on, so that the graph it is part of
// ends.
__device__ __forceinline__ void await_done(const CombineArguments& a) {
  State& state = *a.peers.state;
  if (threadIdx.x >= a.peers.servers || *static_cast<volatile uint32_t*>(&state.lost)) return;
  const uint32_t sequence = state.sequence;
  const uint8_t* done = a.peers.done + threadIdx.x * kDoneStride;
  const uint64_t deadline = global_ns() + a.timeout_ns;
  for (uint32_t spin = 1; static_cast<uint32_t>(load_acquire_system(done)) != sequence; ++spin) {
    if (spin % 64 || global_ns() < deadline) continue;  // the clock is slower than the word
    state.lost = 1;
    Lost& lost = *a.peers.lost;
    lost.layer = a.word >> 20 & 0x7ff;
    lost.tokens = a.word & 0xfffff;
    lost.sequence = sequence;
    __threadfence_system();
    atomicOr_system(&lost.servers, 1u << threadIdx.x);
    return;
  }
}

// For large operations, whose combine needs many SMs that others can use meanwhile.
__device__ __forceinline__ void wait_done(const CombineArguments& a) {
  wait_for_previous_kernel();
  launch_next_kernel();
  await_done(a);
}

// `kPulls`: 16-byte loads in flight per lane and server. `kWaits`: every CTA waits for the MoE
// servers itself, which saves a small operation a kernel.
template <bool kWaits, uint32_t kPulls>
__device__ __forceinline__ void combine(const CombineArguments& a) {
  const uint32_t lane = threadIdx.x % 32, warps = gridDim.x * kWarps, hidden = a.peers.hidden;
  constexpr uint32_t kPullColumns = 256 * kPulls;  // per warp and step
  const uint32_t steps = (hidden + kPullColumns - 1) / kPullColumns, items = a.tokens * steps;
  uint32_t item = blockIdx.x * kWarps + threadIdx.x / 32;
  wait_for_previous_kernel();
  launch_next_kernel();
  uint32_t mask = item < items ? a.peers.masks[item / steps] : 0;
  if constexpr (kWaits) {
    await_done(a);
    __syncthreads();
  }
  while (item < items) {
    const size_t row = static_cast<size_t>(item / steps) * hidden;
    const uint32_t base = item % steps * kPullColumns + lane * 8;
    float sum[kPulls][8] = {};
    for (uint32_t left = mask; left; left &= left - 1) {
      const uint8_t* result = a.peers.slots[__ffs(left) - 1] + a.peers.at.result;
      uint4 part[kPulls];
#pragma unroll
      for (uint32_t j = 0; j < kPulls; ++j)
        if (base + j * 256 < hidden) part[j] = load_peer(result + (row + base + j * 256) * 2);
#pragma unroll
      for (uint32_t j = 0; j < kPulls; ++j) {
        if (base + j * 256 >= hidden) continue;
        const auto* two = reinterpret_cast<const __nv_bfloat162*>(&part[j]);
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
          const float2 v = __bfloat1622float2(two[i]);
          sum[j][2 * i] += v.x;
          sum[j][2 * i + 1] += v.y;
        }
      }
    }
    item += warps;
    if (item < items) mask = a.peers.masks[item / steps];
    auto* out = static_cast<__nv_bfloat16*>(a.out) + row;
#pragma unroll
    for (uint32_t j = 0; j < kPulls; ++j) {
      if (base + j * 256 >= hidden) continue;
      uint4 packed;
      auto* two = reinterpret_cast<__nv_bfloat162*>(&packed);
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i)
        two[i] = __float22bfloat162_rn({sum[j][2 * i], sum[j][2 * i + 1]});
      *reinterpret_cast<uint4*>(out + base + j * 256) = packed;
    }
  }
}

}  // namespace expertplex::attention
