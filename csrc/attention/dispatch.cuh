// Dispatch: push each token once to every MoE server that holds one of its experts, then signal.
//
// A warp takes a few hundred columns of a token at a time, and has the next ones on their way. Ids
// and weights go by themselves, in whole lines: the link's limit is packets, and a small one counts
// like a large one. Gathering scales in a CTA, too, costs more in barriers than it saves. The
// signal needs no system-wide fence: the CTAs' stores are ordered before the last CTA's release by
// the CTA barrier and the acq_rel counter, and release is cumulative.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "attention/memory.cuh"
#include "attention/slot.cuh"

namespace expertplex::attention {

constexpr uint32_t kColumns = 512;  // per warp and load: 16 per lane
constexpr float kFp8Max = 448.0f;

// 16 columns of a token, as the activations' 32 bytes.
struct Columns {
  uint4 half[2];
};

// What a warp works on: columns of one token, and lane k's k-th expert (negative: none). One load
// per item spreads few tokens over many warps; several keep more bytes in flight.
template <uint32_t kLoads>
struct Item {
  Columns columns[kLoads];
  int32_t expert;
};

// FP8 keeps a lane's 16 columns together, so that it stores 16 bytes; bf16 has them 256 apart, so
// that both stores of a warp are contiguous.
template <bool kFp8>
__device__ __forceinline__ uint32_t column(uint32_t lane, uint32_t half) {
  return kFp8 ? lane * 16 + half * 8 : half * 256 + lane * 8;
}

template <bool kFp8, uint32_t kLoads>
__device__ __forceinline__ Item<kLoads> load_item(const DispatchArguments& a, uint32_t token,
                                                  uint32_t first, uint32_t lane) {
  const auto* row =
      static_cast<const __nv_bfloat16*>(a.x) + static_cast<size_t>(token) * a.peers.hidden;
  Item<kLoads> item;
#pragma unroll
  for (uint32_t l = 0; l < kLoads; ++l) {
#pragma unroll
    for (uint32_t h = 0; h < 2; ++h) {
      const uint32_t at = first + l * kColumns + column<kFp8>(lane, h);
      item.columns[l].half[h] =
          at < a.peers.hidden ? *reinterpret_cast<const uint4*>(row + at) : uint4{};
    }
  }
  const size_t at = static_cast<size_t>(token) * a.peers.topk + lane;
  item.expert = lane < a.peers.topk ? a.ids[at] : -1;
  return item;
}

// Eight lanes hold one block of 128 columns; all get its scale.
__device__ __forceinline__ uint4 quantise(const Columns& c, float& scale) {
  float v[16], largest = 1e-10f;
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    const float2 two =
        __bfloat1622float2(reinterpret_cast<const __nv_bfloat162*>(&c.half[i / 4])[i % 4]);
    v[2 * i] = two.x;
    v[2 * i + 1] = two.y;
    largest = fmaxf(largest, fmaxf(fabsf(two.x), fabsf(two.y)));
  }
#pragma unroll
  for (uint32_t step = 4; step; step /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
  scale = largest / kFp8Max;
  const float inverse = kFp8Max / largest;
  uint32_t q[4];
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t low = __nv_cvt_float2_to_fp8x2({v[4 * i] * inverse, v[4 * i + 1] * inverse},
                                                  __NV_SATFINITE, __NV_E4M3);
    const uint32_t high = __nv_cvt_float2_to_fp8x2({v[4 * i + 2] * inverse, v[4 * i + 3] * inverse},
                                                   __NV_SATFINITE, __NV_E4M3);
    q[i] = low | high << 16;
  }
  return {q[0], q[1], q[2], q[3]};
}

// Where an expert is, as in DispatchArguments; on server kMaxServers if nowhere: vLLM pads routing
// with -1.
__device__ __forceinline__ uint32_t place_of(const uint32_t* places, int32_t expert,
                                             uint32_t experts) {
  return expert >= 0 && expert < static_cast<int32_t>(experts) ? places[expert] : kMaxServers << 16;
}

// Bit z: one of the experts that the lanes have is on server z.
__device__ __forceinline__ uint32_t servers_of(uint32_t place) {
  const uint32_t server = place >> 16;
  return __reduce_or_sync(~0u, server < kMaxServers ? 1u << server : 0u);
}

// An id and its weight, of [tokens, topk].
struct Pair {
  int32_t expert;
  float weight;
};

__device__ __forceinline__ Pair load_pair(const DispatchArguments& a, uint32_t i) {
  if (i >= a.tokens * a.peers.topk) return {-1, 0};
  return {a.ids[i], a.weights[i]};
}

// Every server gets every token's ids, also where they say "none here"; weights go along. `next`:
// the pair at `i`, this thread's first.
__device__ __forceinline__ void push_routing(const DispatchArguments& a, const uint32_t* places,
                                             uint32_t i, Pair next) {
  while (i < a.tokens * a.peers.topk) {
    const uint32_t at = i, place = place_of(places, next.expert, a.peers.experts);
    const float weight = next.weight;
    next = load_pair(a, i += gridDim.x * kThreads);
    for (uint32_t z = 0; z < a.peers.servers; ++z) {
      uint8_t* slot = a.peers.slots[z];
      reinterpret_cast<int32_t*>(slot + a.peers.at.ids)[at] =
          place >> 16 == z ? static_cast<int32_t>(place & 0xffff) : -1;
      reinterpret_cast<float*>(slot + a.peers.at.weights)[at] = weight;
    }
  }
}

template <uint32_t kLoads>
__device__ __forceinline__ void push_fp8(const DispatchArguments& a, const Item<kLoads>& item,
                                         uint32_t mask, uint32_t token, uint32_t first,
                                         uint32_t lane) {
  uint4 packed[kLoads];
  float mine = 0;  // lane 4 l + g: the scale of load l's block g, so that all leave in one store
#pragma unroll
  for (uint32_t l = 0; l < kLoads; ++l) {
    float scale;
    packed[l] = quantise(item.columns[l], scale);
    const float block = __shfl_sync(~0u, scale, lane % 4 * 8);
    if (lane / 4 == l) mine = block;
  }
  const size_t at = static_cast<size_t>(token) * a.peers.hidden + first;
  for (uint32_t left = mask; left; left &= left - 1) {
    uint8_t* slot = a.peers.slots[__ffs(left) - 1];
#pragma unroll
    for (uint32_t l = 0; l < kLoads; ++l) {
      const uint32_t col = l * kColumns + lane * 16;
      if (first + col < a.peers.hidden)
        *reinterpret_cast<uint4*>(slot + a.peers.at.tokens + at + col) = packed[l];
    }
    if (lane < 4 * kLoads && first + lane * kScaleColumns < a.peers.hidden)
      reinterpret_cast<float*>(slot + a.peers.at.scales)[at / kScaleColumns + lane] = mine;
  }
}

template <uint32_t kLoads>
__device__ __forceinline__ void push_bf16(const DispatchArguments& a, const Item<kLoads>& item,
                                          uint32_t mask, uint32_t token, uint32_t first,
                                          uint32_t lane) {
  const size_t row = static_cast<size_t>(token) * a.peers.hidden;
  for (uint32_t left = mask; left; left &= left - 1) {
    uint8_t* slot = a.peers.slots[__ffs(left) - 1];
#pragma unroll
    for (uint32_t l = 0; l < kLoads; ++l) {
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) {
        const uint32_t col = first + l * kColumns + column<false>(lane, h);
        if (col < a.peers.hidden)
          *reinterpret_cast<uint4*>(slot + a.peers.at.tokens + (row + col) * 2) =
              item.columns[l].half[h];
      }
    }
  }
}

// The last CTA to come gives the operation its number and tells every server. `latest`: the number
// before, read by thread 0 when the kernel began.
__device__ __forceinline__ void signal(const DispatchArguments& a, uint32_t latest) {
  __shared__ uint32_t sequence;  // 0: not the last CTA
  __syncthreads();
  if (threadIdx.x == 0) {
    State& state = *a.peers.state;
    sequence = 0;
    if (add_acq_rel_gpu(&state.arrived, 1) == gridDim.x - 1) {
      sequence = latest + 1 ? latest + 1 : 1;
      state.sequence = sequence;
      state.arrived = 0;
    }
  }
  __syncthreads();
  if (sequence && threadIdx.x < a.peers.servers)
    store_release_system(a.peers.slots[threadIdx.x],
                         static_cast<uint64_t>(sequence) << 32 | a.word);
}

template <bool kFp8, uint32_t kLoads>
__device__ __forceinline__ void dispatch(const DispatchArguments& a) {
  __shared__ uint32_t places[kMaxExperts];
  wait_for_previous_kernel();
  launch_next_kernel();
  const uint32_t lane = threadIdx.x % 32, warps = gridDim.x * kWarps;
  constexpr uint32_t kItem = kLoads * kColumns;
  const uint32_t parts = (a.peers.hidden + kItem - 1) / kItem, items = a.tokens * parts;
  uint32_t index = blockIdx.x * kWarps + threadIdx.x / 32;
  // Everything that a small operation needs is on its way at once.
  Item<kLoads> next;
  if (index < items) next = load_item<kFp8, kLoads>(a, index / parts, index % parts * kItem, lane);
  const uint32_t pair = blockIdx.x * kThreads + threadIdx.x;
  const Pair routing = load_pair(a, pair);
  const uint32_t latest = threadIdx.x == 0 ? a.peers.state->sequence : 0;
  for (uint32_t e = threadIdx.x; e < a.peers.experts; e += kThreads) places[e] = a.places[e];
  __syncthreads();
  push_routing(a, places, pair, routing);
  while (index < items) {
    const Item<kLoads> item = next;
    const uint32_t token = index / parts, first = index % parts * kItem;
    index += warps;
    if (index < items)
      next = load_item<kFp8, kLoads>(a, index / parts, index % parts * kItem, lane);
    const uint32_t mask = servers_of(place_of(places, item.expert, a.peers.experts));
    if (first == 0 && lane == 0) a.peers.masks[token] = mask;
    if constexpr (kFp8)
      push_fp8(a, item, mask, token, first, lane);
    else
      push_bf16(a, item, mask, token, first, lane);
  }
  signal(a, latest);
}

}  // namespace expertplex::attention
