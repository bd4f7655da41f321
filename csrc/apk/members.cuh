// Whose a token is: an operation's tokens come from one slot, or from several that run as one.
#pragma once

#include "operation.cuh"
#include "sync.cuh"

namespace expertplex::apk {

// A token's slot, and its place there.
struct Origin {
  const Template* slot;
  uint32_t token;
};

// One warp's: lane i knows member i. Every lane must call find().
class Origins {
 public:
  __device__ __forceinline__ Origins(const Launch& p, const TileMessage& m)
      : templates_(p.templates), slot_(m.operation()) {
    if (!m.merged()) return;
    const Members& g = p.members[slot_];
    const uint32_t lane = thread_index() % 32;
    count_ = __ldcg(&g.count);
    first_ = __ldcg(&g.first[lane]);
    slot_ = __ldcg(&g.slot[lane]);
  }
  __device__ __forceinline__ Origin find(uint32_t token) const {
    if (count_ == 1) return {templates_ + slot_, token};
    uint32_t member = 0;
#pragma unroll 1
    for (uint32_t i = 1; i < count_; ++i) member += __shfl_sync(~0u, first_, i) <= token;
    return {templates_ + __shfl_sync(~0u, slot_, member), token - __shfl_sync(~0u, first_, member)};
  }

 private:
  const Template* templates_;
  uint32_t count_ = 1, first_ = 0, slot_;
};

}  // namespace expertplex::apk
