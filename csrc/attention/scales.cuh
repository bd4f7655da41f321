// FP8 scales on their way to whole lines. A token's are few bytes, and on the link a piece that is
// no whole 32-byte sector costs more than a line: so a warp keeps those of neighbouring tokens
// until they fill lines, in shared memory of its own (no barrier but the warp's).
#pragma once

#include "attention/slot.cuh"

namespace expertplex::attention {

constexpr uint32_t kTogether = 4;  // tokens: of 3072 columns, 384 bytes of scales
constexpr uint32_t kHeldScales = 256;

// What one warp holds back: scales that follow one another in [tokens, hidden / 128] and go to the
// same servers.
struct HeldScales {
  float* values;  // [kHeldScales]
  uint32_t first, count;
  uint32_t mask;  // bit z: for server z
};

// Sends them. The whole warp.
__device__ __forceinline__ void flush(const Peers& peers, HeldScales& held, uint32_t lane) {
  __syncwarp();
  for (uint32_t left = held.mask; left; left &= left - 1) {
    auto* scales = reinterpret_cast<float*>(peers.slots[__ffs(left) - 1] + peers.at.scales);
    for (uint32_t i = lane; i < held.count; i += 32) scales[held.first + i] = held.values[i];
  }
  held.first += held.count;
  held.count = 0;
  __syncwarp();
}

// Room for `count` more, which begin at `first` and go to the servers of `mask`; returns where they
// are to be put.
__device__ __forceinline__ float* hold(const Peers& peers, HeldScales& held, uint32_t first,
                                       uint32_t count, uint32_t mask, uint32_t lane) {
  if (mask != held.mask || first != held.first + held.count || held.count + count > kHeldScales) {
    flush(peers, held, lane);
    held.first = first;
    held.mask = mask;
  }
  held.count += count;
  return held.values + (held.count - count);
}

}  // namespace expertplex::attention
