// Dispatch: push each token once to every MoE server that holds one of its experts, then signal.
//
// A warp takes a few hundred columns of a token at a time, and has the next ones on their way. What
// it sends in small pieces (scales, ids, weights) is gathered by its CTA and crosses the link in
// whole lines: the link's limit is packets, and a small one counts like a large one. The signal
// needs no system-wide fence: the CTAs' stores are ordered before the last CTA's release by the CTA
// barrier and the acq_rel counter, and release is cumulative.
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
  float weight;
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
  item.weight = lane < a.peers.topk ? a.weights[at] : 0;
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

// Where a token's experts are: lane k knows its k-th expert's server (kMaxServers: nowhere) and
// slot, all lanes know the mask of servers.
struct Route {
  uint32_t server, mask;
  int32_t slot;
};

__device__ __forceinline__ Route route(const uint32_t* places, int32_t expert, uint32_t experts) {
  Route r{kMaxServers, 0, -1};
  // vLLM pads routing with -1.
  if (expert >= 0 && expert < static_cast<int32_t>(experts)) {
    r.server = places[expert] >> 16;
    r.slot = static_cast<int32_t>(places[expert] & 0xffff);
  }
  r.mask = __reduce_or_sync(~0u, r.server < kMaxServers ? 1u << r.server : 0u);
  return r;
}

// How the columns of a step's tokens are cut into items, one per warp and round.
template <uint32_t kLoads>
struct Cut {
  static constexpr uint32_t kItem = kLoads * kColumns, kScales = kItem / kScaleColumns;
  uint32_t parts, scales;  // of a token

  __device__ explicit Cut(uint32_t hidden)
      : parts((hidden + kItem - 1) / kItem), scales(hidden / kScaleColumns) {}
  __device__ uint32_t token(uint32_t item) const { return item / parts; }
  __device__ uint32_t first(uint32_t item) const { return item % parts * kItem; }
  // Of [tokens, scales], where the item's are, or would be.
  __device__ uint32_t scale(uint32_t item) const {
    return token(item) * scales + item % parts * kScales;
  }
  // Tokens whose first item comes before this one.
  __device__ uint32_t tokens_before(uint32_t item) const { return (item + parts - 1) / parts; }
};

// The small pieces of one round's items, a run of neighbours.
template <uint32_t kLoads>
struct Stage {
  float scales[kWarps * Cut<kLoads>::kScales];
  uint32_t places[kWarps * kMaxTopK];  // as in DispatchArguments; server kMaxServers: nowhere
  float weights[kWarps * kMaxTopK];
};

// Items [begin, end). Every server gets every token's ids, also where they say "none here"; scales
// and weights go along with them.
template <bool kFp8, uint32_t kLoads>
__device__ __forceinline__ void push_stage(const DispatchArguments& a, const Stage<kLoads>& stage,
                                           const Cut<kLoads>& cut, uint32_t begin, uint32_t end) {
  const size_t pair = static_cast<size_t>(cut.tokens_before(begin)) * a.peers.topk;
  const uint32_t pairs =
      static_cast<uint32_t>(static_cast<size_t>(cut.tokens_before(end)) * a.peers.topk - pair);
  const uint32_t scale = cut.scale(begin), scales = min(cut.scale(end - 1) + cut.kScales,
                                                        (cut.token(end - 1) + 1) * cut.scales) -
                                                    scale;
  for (uint32_t z = 0; z < a.peers.servers; ++z) {
    uint8_t* slot = a.peers.slots[z];
    for (uint32_t i = threadIdx.x; i < pairs; i += kThreads) {
      const uint32_t place = stage.places[i];
      reinterpret_cast<int32_t*>(slot + a.peers.at.ids)[pair + i] =
          place >> 16 == z ? static_cast<int32_t>(place & 0xffff) : -1;
      reinterpret_cast<float*>(slot + a.peers.at.weights)[pair + i] = stage.weights[i];
    }
    if constexpr (kFp8)
      for (uint32_t i = threadIdx.x; i < scales; i += kThreads)
        reinterpret_cast<float*>(slot + a.peers.at.scales)[scale + i] = stage.scales[i];
  }
}

// Returns, in lane 4 l + g, the scale of load l's block g.
template <uint32_t kLoads>
__device__ __forceinline__ float push_fp8(const DispatchArguments& a, const Item<kLoads>& item,
                                          uint32_t mask, uint32_t token, uint32_t first,
                                          uint32_t lane) {
  uint4 packed[kLoads];
  float mine = 0;
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
  }
  return mine;
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
  __shared__ Stage<kLoads> stages[2];
  wait_for_previous_kernel();
  launch_next_kernel();
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, topk = a.peers.topk;
  const Cut<kLoads> cut(a.peers.hidden);
  const uint32_t items = a.tokens * cut.parts;
  // Everything that a small operation needs is on its way at once.
  uint32_t begin = blockIdx.x * kWarps;
  Item<kLoads> next;
  if (uint32_t i = begin + warp; i < items)
    next = load_item<kFp8, kLoads>(a, cut.token(i), cut.first(i), lane);
  const uint32_t latest = threadIdx.x == 0 ? a.peers.state->sequence : 0;
  for (uint32_t e = threadIdx.x; e < a.peers.experts; e += kThreads) places[e] = a.places[e];
  __syncthreads();
  for (uint32_t round = 0; begin < items; ++round) {
    Stage<kLoads>& stage = stages[round % 2];
    const uint32_t end = min(begin + kWarps, items), i = begin + warp;
    const uint32_t following = begin + gridDim.x * kWarps;
    const Item<kLoads> item = next;
    if (following + warp < items)
      next = load_item<kFp8, kLoads>(a, cut.token(following + warp), cut.first(following + warp),
                                     lane);
    if (i < end) {
      const uint32_t token = cut.token(i), first = cut.first(i);
      const Route r = route(places, item.expert, a.peers.experts);
      if (first == 0 && lane == 0) a.peers.masks[token] = r.mask;
      if (first == 0 && lane < topk) {
        const uint32_t at = (token - cut.tokens_before(begin)) * topk + lane;
        stage.places[at] = r.server << 16 | (r.slot & 0xffff);
        stage.weights[at] = item.weight;
      }
      if constexpr (kFp8) {
        const float scale = push_fp8(a, item, r.mask, token, first, lane);
        if (lane < cut.kScales && first / kScaleColumns + lane < cut.scales)
          stage.scales[cut.scale(i) - cut.scale(begin) + lane] = scale;
      } else {
        push_bf16(a, item, r.mask, token, first, lane);
      }
    }
    // The stage before this one has been read by all: they have come past the last barrier.
    __syncthreads();
    push_stage<kFp8>(a, stage, cut, begin, end);
    begin = following;
  }
  signal(a, latest);
}

}  // namespace expertplex::attention
