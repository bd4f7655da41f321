// silu(gate) * up, with the exponential that vLLM's fused CPU kernel takes where it is to be had.
#pragma once
#include <cstdint>

namespace expertplex::cpu {
#ifdef XP_TORCH_VECTORS
// out[i] = up[i] * (gate[i] * (1 / (1 + exp(-gate[i])))), each operation rounded to fp32. `n` is a
// multiple of 16. Only for processors with AVX-512 F, BW, DQ and VL.
void silu_mul_avx512(const float* gate, const float* up, float* out, int64_t n);
#endif
}  // namespace expertplex::cpu
