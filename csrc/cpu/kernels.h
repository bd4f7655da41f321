// Arithmetic of a tile on a CPU: products by torch's micro-kernels, and the elementwise work around
// them. Knows nothing of operations or scheduling.
//
// Products are `at::native::cpublas::brgemm`, oneDNN's JIT kernels (AMX, AVX-512, AVX2) behind an
// exported torch function of plain pointers and integers. It is looked up in the libtorch_cpu that
// the process has loaded, so that this module needs no torch to build. Its rows do not depend on
// how many are computed together, so results do not depend on batching.
#pragma once
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/silu.h"
#include "simd.h"

namespace expertplex::cpu {
constexpr int64_t kPanel = 32;      // output columns whose weights lie together
constexpr int64_t kRows = 32;       // most rows of one product
constexpr int64_t kFp8Block = 128;  // rows and columns under one FP8 scale

enum class Dtype : uint8_t { kFloat32, kBfloat16, kFloat16, kFloat8 };
inline int64_t size_of(Dtype t) { return t == Dtype::kFloat32 ? 4 : t == Dtype::kFloat8 ? 1 : 2; }

inline float from_bf16(uint16_t v) {
  const uint32_t bits = static_cast<uint32_t>(v) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline uint16_t to_bf16(float f) {  // to nearest even; a NaN stays one
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  return static_cast<uint16_t>(f == f ? rounded : bits >> 16 | 0x40u);
}
inline float from_fp8(uint8_t v) {  // e4m3fn, subnormals included
  const uint32_t bits = static_cast<uint32_t>(v & 0x80u) << 24 | static_cast<uint32_t>(v & 0x7fu)
                                                                     << 20;
  float f;
  std::memcpy(&f, &bits, 4);
  return (v & 0x7fu) == 0x7fu ? NAN : f * 0x1p120f;
}
inline float exponential(float x) {  // about 1 ulp; Cephes' reduction and polynomial
  x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
  const float n = (x * 1.44269504088896341f + 12582912.0f) - 12582912.0f;  // to nearest
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return p * power;
}

XP_SIMD inline void widen(const uint16_t* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = from_bf16(in[i]);
}
XP_SIMD inline void widen_half(const _Float16* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(in[i]);
}
XP_SIMD inline void dequantise(const uint8_t* in, float scale, uint16_t* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = to_bf16(from_fp8(in[i]) * scale);
}
XP_SIMD inline void dequantise(const uint8_t* in, float scale, float* out, int64_t n) {
  // Through bf16 here too: an FP8 model computes alike with and without bf16 instructions.
  for (int64_t i = 0; i < n; ++i) out[i] = from_bf16(to_bf16(from_fp8(in[i]) * scale));
}
XP_SIMD inline void narrow(const float* in, uint16_t* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = to_bf16(in[i]);
}
XP_SIMD inline void silu_mul_anywhere(const float* gate, const float* up, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    out[i] = up[i] * (gate[i] * (1.0f / (1.0f + exponential(-gate[i]))));
}
inline void silu_mul(const float* gate, const float* up, float* out, int64_t n) {
#ifdef XP_TORCH_VECTORS
  static const bool avx512 =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512) return silu_mul_avx512(gate, up, out, n);
#endif
  silu_mul_anywhere(gate, up, out, n);
}
XP_SIMD inline void round_to_bf16(float* values, int64_t n) {
  for (int64_t i = 0; i < n; ++i) values[i] = from_bf16(to_bf16(values[i]));
}
XP_SIMD inline void round_to_half(float* values, int64_t n) {
  for (int64_t i = 0; i < n; ++i) values[i] = static_cast<float>(static_cast<_Float16>(values[i]));
}

class Products {
 public:
  // Throws std::runtime_error if torch is not loaded or lacks the function.
  explicit Products(const std::string& libtorch) {
    void* library = dlopen(libtorch.c_str(), RTLD_NOLOAD | RTLD_LAZY);
    if (!library)
      throw std::runtime_error("libtorch_cpu is not loaded from " + libtorch +
                               ": import torch first");
    bf16_ = find(library, "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb");
    f32_ = find(library, "_ZN2at6native7cpublas6brgemmEllllllbPKfS3_Pfb");
    release_ = reinterpret_cast<void (*)(bool)>(
        symbol(library, "_ZN2at6native7cpublas14brgemm_releaseEb"));
  }

  // Can this processor multiply in this dtype?
  bool supports(Dtype compute) const {
    const std::vector<char> zeros(kPanel * kPanel * 4);
    std::vector<float> c(kPanel);
    try {
      (*this)(compute, 1, kPanel, zeros.data(), zeros.data(), c.data(), kPanel);
    } catch (const std::exception&) {
      return false;
    }
    release();
    return true;
  }

  // C[rows, kPanel] = A[rows, k] * panel, fp32. `rows` is one of 1, 2, 4, 8, 16, 32: each is a
  // kernel that oneDNN generates on its first use, per thread.
  void operator()(Dtype compute, int64_t rows, int64_t k, const void* a, const void* panel,
                  float* c, int64_t ld_c) const {
    const bool bf16 = compute == Dtype::kBfloat16;
    (bf16 ? bf16_ : f32_)(rows, kPanel, k, k, kPanel, ld_c, false, a, panel, c, bf16);
  }

  // Gives the thread's AMX tiles back. oneDNN remembers what it has configured, so a thread that
  // also runs somebody else's AMX code must not go from one to the other without this.
  void release() const { release_(true); }

 private:
  using Function = void (*)(int64_t m, int64_t n, int64_t k, int64_t ld_a, int64_t ld_b,
                            int64_t ld_c, bool add, const void* a, const void* b, float* c,
                            bool vnni);
  static void* symbol(void* library, const char* name) {
    void* found = dlsym(library, name);
    if (!found)
      throw std::runtime_error(std::string("this torch has no ") + name +
                               "; use the torch version that vLLM asks for, or the torch backend");
    return found;
  }
  static Function find(void* library, const char* name) {
    return reinterpret_cast<Function>(symbol(library, name));
  }
  Function bf16_, f32_;
  void (*release_)(bool);
};

// Rows that a product of at least `rows` computes: the next of 1, 2, 4, 8, 16, 32.
inline int64_t row_class(int64_t rows) {
  int64_t c = 1;
  while (c < rows) c *= 2;
  return c;
}

// Reorders a weight [n, k] in place into panels of kPanel output columns, as products want them:
// [k / 2][kPanel][2] for bf16 arithmetic, [k][kPanel] for fp32.
template <class T>
void pack(T* weight, int64_t n, int64_t k, Dtype compute) {
  const int64_t pair = compute == Dtype::kBfloat16 ? 2 : 1;
  std::vector<T> panel(static_cast<size_t>(kPanel * k));
  for (int64_t first = 0; first < n; first += kPanel) {
    T* rows = weight + first * k;
    for (int64_t c = 0; c < kPanel; ++c)
      for (int64_t i = 0; i < k; ++i)
        panel[(i / pair * kPanel + c) * pair + i % pair] = rows[c * k + i];
    std::memcpy(rows, panel.data(), panel.size() * sizeof(T));
  }
}
inline void pack(void* weight, int64_t n, int64_t k, Dtype stored, Dtype compute) {
  switch (size_of(stored)) {
    case 1:
      return pack(static_cast<uint8_t*>(weight), n, k, compute);
    case 2:
      return pack(static_cast<uint16_t*>(weight), n, k, compute);
    default:
      return pack(static_cast<uint32_t*>(weight), n, k, compute);
  }
}

// A panel in the dtype of the products: as stored, or converted into `scratch` [k, kPanel].
// `scales`: one per kFp8Block of k, for FP8 only.
inline const void* panel_for(const void* stored, Dtype dtype, Dtype compute, int64_t k,
                             const float* scales, void* scratch) {
  if (dtype == compute) return stored;
  const int64_t block = kFp8Block * kPanel;  // both orders keep a block of k together
  if (dtype == Dtype::kFloat8) {
    for (int64_t first = 0, n = k * kPanel; first < n; first += block) {
      const uint8_t* in = static_cast<const uint8_t*>(stored) + first;
      const int64_t count = std::min(block, n - first);
      if (compute == Dtype::kBfloat16)
        dequantise(in, scales[first / block], static_cast<uint16_t*>(scratch) + first, count);
      else
        dequantise(in, scales[first / block], static_cast<float*>(scratch) + first, count);
    }
  } else if (dtype == Dtype::kBfloat16) {
    widen(static_cast<const uint16_t*>(stored), static_cast<float*>(scratch), k * kPanel);
  } else {
    widen_half(static_cast<const _Float16*>(stored), static_cast<float*>(scratch), k * kPanel);
  }
  return scratch;
}

// n values of the model's dtype -> the dtype of the products.
inline void load_row(const void* in, Dtype dtype, Dtype compute, void* out, int64_t n) {
  if (dtype == compute)
    std::memcpy(out, in, static_cast<size_t>(n * size_of(dtype)));
  else if (dtype == Dtype::kBfloat16)
    widen(static_cast<const uint16_t*>(in), static_cast<float*>(out), n);
  else
    widen_half(static_cast<const _Float16*>(in), static_cast<float*>(out), n);
}

// silu(gate) * up of a panel's columns in one row: fp32, then rounded to the model's dtype.
inline void activate(const float* gate, const float* up, Dtype model, Dtype compute, void* out) {
  float values[kPanel];
  silu_mul(gate, up, values, kPanel);
  if (compute == Dtype::kBfloat16) return narrow(values, static_cast<uint16_t*>(out), kPanel);
  if (model == Dtype::kBfloat16) round_to_bf16(values, kPanel);
  if (model == Dtype::kFloat16) round_to_half(values, kPanel);
  std::memcpy(out, values, sizeof(values));
}
}  // namespace expertplex::cpu
