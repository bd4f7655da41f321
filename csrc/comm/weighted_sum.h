// The arithmetic of combine. Where it rounds is where vLLM's fused CPU kernel rounds, so that a
// deployment's answers equal plain vLLM's bit for bit, whatever the number of MoE servers.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "simd.h"

namespace expertplex {

XP_SIMD inline void scale_into(float* out, const float* row, float weight, size_t n) {
  for (size_t i = 0; i < n; ++i) out[i] = row[i] * weight;
}

// Not rounded between product and sum, on any processor.
XP_SIMD inline void scale_add(float* out, const float* row, float weight, size_t n) {
  for (size_t i = 0; i < n; ++i) out[i] = std::fma(row[i], weight, out[i]);
}

// out [hidden] = sum over k of weights[k] * rows[k], in fp32 and in the order of k. A row that is
// nullptr is nobody's and adds nothing.
inline void weighted_sum(float* out, const float* const* rows, const float* weights, uint32_t topk,
                         size_t hidden) {
  bool first = true;
  for (uint32_t k = 0; k < topk; ++k) {
    if (!rows[k]) continue;
    (first ? scale_into : scale_add)(out, rows[k], weights[k], hidden);
    first = false;
  }
  if (first) std::memset(out, 0, hidden * sizeof(float));
}

}  // namespace expertplex
