// What an operation is to the kernel: its handle, and how many tiles its row stages have.
//
// Both follow from the number of tokens alone, so the controller can make an operation of a ready
// word. Nothing here knows where operations come from.
#pragma once

#include "layout.cuh"

namespace expertplex::apk {

constexpr uint32_t kWarpsPerCluster = kCluster * kMathThreads / 32;
constexpr uint32_t kCountPairs = 4096;  // (token, expert) pairs one CTA counts per tile
// A warp sums so many columns of a token at once, and so many such slices per tile at most.
constexpr uint32_t kGatherColumns = 256;
constexpr uint32_t kGatherSlices = (kHidden + kGatherColumns - 1) / kGatherColumns;
constexpr uint32_t kMaxGatherItems = 6;
constexpr uint32_t kMaxActivateItems = 4;

// Operation::user = template:10 | merged:1 | wide:1 | tokens:20 | identity:32. Merged: of several
// slots, see Members. Wide: prefill's tiles (128x192), else decode's (128x128 and 64x256). The
// identity is an index into Launch::times in a finite run, and the sequence number of the slot's
// operation in a resident one.
__host__ __device__ constexpr uint64_t handle(uint32_t tmpl, bool merged, bool wide,
                                              uint32_t tokens, uint32_t identity) {
  return static_cast<uint64_t>(identity) << 32 | tokens << 12 | static_cast<uint32_t>(wide) << 11 |
         static_cast<uint32_t>(merged) << 10 | tmpl;
}
__host__ __device__ constexpr uint32_t template_of(uint64_t handle) { return handle & 0x3ff; }
__host__ __device__ constexpr bool is_merged(uint64_t handle) { return handle >> 10 & 1; }
__host__ __device__ constexpr uint32_t tokens_of(uint64_t handle) {
  return static_cast<uint32_t>(handle) >> 12;
}
__host__ __device__ constexpr uint32_t identity_of(uint64_t handle) {
  return static_cast<uint32_t>(handle >> 32);
}

// A small operation is counted by every CTA that copies rows of it, so it has no counting stage.
__host__ __device__ constexpr bool counts_itself(uint32_t tokens) {
  return tokens * kTopK <= kCountPairs;
}

// What one warp takes of a row stage per tile: (token, expert) pairs, or slices of tokens in the
// gather. Few for decode, so that a few tokens spread over the GPU.
__device__ __forceinline__ uint32_t items_per_warp(uint32_t stage, uint32_t tokens) {
  constexpr uint32_t kWarps = 66 * kWarpsPerCluster;
  const uint32_t pairs = tokens * kTopK;
  if (stage == kCopy) return pairs <= kWarps ? 1 : tokens <= 4 * kWarps ? kTopK : 2 * kTopK;
  if (stage == kActivate) return min(kMaxActivateItems, ceil_div(pairs, kWarps));
  return min(kMaxGatherItems, ceil_div(tokens * kGatherSlices, kWarps));
}

// The same for the activation once it is known how many rows the pairs have here: a warp takes so
// many pairs that it finds as many rows as above.
__device__ __forceinline__ uint32_t activate_items(uint32_t tokens, uint32_t rows) {
  const uint32_t pairs = tokens * kTopK, items = items_per_warp(kActivate, tokens);
  return items < kMaxActivateItems ? items : min(32u, max(items, items * pairs / max(rows, 1u)));
}

// All six stages of an operation whose `user` is set. The GEMMs' tiles follow from the count.
__device__ __forceinline__ void set_stages(Operation& op) {
  const uint32_t tokens = tokens_of(op.user), pairs = tokens * kTopK;
  auto tiles = [&](uint32_t stage, uint32_t items) {
    return ceil_div(items, kWarpsPerCluster * items_per_warp(stage, tokens));
  };
  op.n_stages = tokens ? kStages6 : 0;
  op.tiles[kCount] = counts_itself(tokens) ? 0 : ceil_div(pairs, kCluster * kCountPairs);
  op.tiles[kCopy] = tiles(kCopy, pairs);
  op.tiles[kStageGateUp] = op.tiles[kStageDown] = 1;
  op.tiles[kActivate] = tiles(kActivate, pairs);
  op.tiles[kGather] = tiles(kGather, tokens * kGatherSlices);
}

}  // namespace expertplex::apk
