// The activation in AVX-512, compiled against torch's vector headers.
//
// vLLM's fused kernel (csrc/cpu/cpu_fused_moe.cpp) approximates the exponential as torch's exp_u20
// does. An approximation that is closer rounds one bf16 activation in two thousand differently, and
// answers then differ from plain vLLM's. So it is taken from where vLLM has it from.
//
// This file alone is compiled for AVX-512: it must define nothing that another file may be linked
// against, hence no standard library here.
#include <ATen/cpu/vec/vec512/vec512_float.h>

#include "cpu/silu.h"

namespace expertplex::cpu {
void silu_mul_avx512(const float* gate, const float* up, float* out, int64_t n) {
  using Floats = at::vec::Vectorized<float>;
  const Floats one(1.0f);
  for (int64_t i = 0; i < n; i += Floats::size()) {
    const Floats g = Floats::loadu(gate + i);
    const Floats sigmoid = one / (one + g.neg().exp_u20());
    (Floats::loadu(up + i) * (g * sigmoid)).store(out + i);
  }
}
}  // namespace expertplex::cpu
