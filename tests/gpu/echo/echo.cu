// A stand-in for a MoE server's kernel, for tests and benchmarks of the data path: it follows the
// same protocol and returns a simple function of every byte it was sent.
//
// result[t, h] = x[t, h] * sum over local k of weight[t, k] * (id[t, k] + 1)  +  layer + phase / 2
//
// grid (CTAs, sources). A source's first CTA polls its ready word and passes it on to the others;
// the last to finish an operation releases the done word.
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "attention/memory.cuh"
#include "attention/slot.cuh"

namespace at = expertplex::attention;

constexpr uint32_t kMaxSources = 16, kTimes = 1 << 16;
constexpr uint64_t kStop = 1;  // no operation's ready word: those have a sequence number

struct Source {
  uint8_t* slot;
  uint8_t* done;  // this server's word, on the source's GPU
  at::Offsets at;
};

struct EchoArguments {
  Source sources[kMaxSources];
  uint64_t* passed;      // [sources, CTAs, 16]: the ready word, a line per CTA
  uint32_t* finished;    // [sources]: CTAs that have finished the operation in flight
  uint64_t* began;       // [sources]: when CTA 0 saw it
  uint32_t* times;       // [sources, kTimes]: ns from then to done, by sequence
  const uint32_t* stop;  // host memory
  uint64_t max_ns;
  uint32_t hidden, topk, fp8, reserved;
};

extern "C" __device__ const uint32_t expertplex_echo_sizes[] = {sizeof(EchoArguments)};

// Only this polls across GPUs, and only this looks at the host.
__device__ uint64_t next_ready(const EchoArguments& a, const uint8_t* slot, uint32_t sequence,
                               uint64_t deadline) {
  for (uint32_t spin = 1;; ++spin) {
    const uint64_t word = at::load_acquire_system(slot);
    if (word >> 32 != sequence) return word;
    if (spin % 4096 == 0 &&
        (*static_cast<const volatile uint32_t*>(a.stop) || at::global_ns() > deadline))
      return kStop;
  }
}

__device__ uint64_t next_passed(const uint64_t* passed, uint64_t last) {
  for (;;) {
    uint64_t word;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(passed) : "memory");
    if (word != last) return word;
  }
}

__device__ void load_row(const EchoArguments& a, const Source& s, size_t at, float (&v)[8]) {
  if (a.fp8) {
    const float scale = __ldcg(reinterpret_cast<const float*>(s.slot + s.at.scales) + at / 128);
    const uint2 raw = __ldcg(reinterpret_cast<const uint2*>(s.slot + s.at.tokens + at));
    const auto* values = reinterpret_cast<const __nv_fp8_e4m3*>(&raw);
    for (int i = 0; i < 8; ++i) v[i] = __fmul_rn(static_cast<float>(values[i]), scale);
  } else {
    const uint4 raw = __ldcg(reinterpret_cast<const uint4*>(s.slot + s.at.tokens + at * 2));
    const auto* values = reinterpret_cast<const __nv_bfloat16*>(&raw);
    for (int i = 0; i < 8; ++i) v[i] = __bfloat162float(values[i]);
  }
}

__device__ void echo_token(const EchoArguments& a, const Source& s, uint32_t token, float add,
                           uint32_t lane) {
  float factor = 0;
  bool local = false;
  for (uint32_t k = 0; k < a.topk; ++k) {
    const size_t at = static_cast<size_t>(token) * a.topk + k;
    const int32_t id = __ldcg(reinterpret_cast<const int32_t*>(s.slot + s.at.ids) + at);
    if (id < 0) continue;
    local = true;
    const float weight = __ldcg(reinterpret_cast<const float*>(s.slot + s.at.weights) + at);
    factor = __fadd_rn(factor, __fmul_rn(weight, static_cast<float>(id + 1)));
  }
  if (!local) return;
  for (uint32_t column = lane * 8; column < a.hidden; column += 256) {
    const size_t at = static_cast<size_t>(token) * a.hidden + column;
    float v[8];
    load_row(a, s, at, v);
    uint4 packed;
    auto* out = reinterpret_cast<__nv_bfloat16*>(&packed);
    for (int i = 0; i < 8; ++i)
      out[i] = __float2bfloat16_rn(__fadd_rn(__fmul_rn(v[i], factor), add));
    *reinterpret_cast<uint4*>(s.slot + s.at.result + at * 2) = packed;
  }
}

extern "C" __global__ void __launch_bounds__(at::kThreads)
    expertplex_echo(const __grid_constant__ EchoArguments a) {
  __shared__ uint64_t word;
  const uint32_t source = blockIdx.y, lane = threadIdx.x % 32;
  const Source& s = a.sources[source];
  const uint64_t deadline = at::global_ns() + a.max_ns;
  uint64_t* passed = a.passed + source * gridDim.x * 16;
  for (uint64_t ready = 0;;) {
    if (threadIdx.x == 0 && blockIdx.x == 0) {
      word = next_ready(a, s.slot, ready >> 32, deadline);
      a.began[source] = at::global_ns();
    } else if (threadIdx.x == 0) {
      word = next_passed(passed + blockIdx.x * 16, ready);
    }
    __syncthreads();
    if (blockIdx.x == 0)
      for (uint32_t cta = 1 + threadIdx.x; cta < gridDim.x; cta += at::kThreads)
        asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(passed + cta * 16), "l"(word)
                     : "memory");
    ready = word;
    if (ready == kStop) return;
    const uint32_t tokens = ready & 0xfffff;
    const float add = (ready >> 20 & 0x7ff) + 0.5f * (ready >> 31 & 1);
    for (uint32_t t = blockIdx.x * at::kWarps + threadIdx.x / 32; t < tokens;
         t += gridDim.x * at::kWarps)
      echo_token(a, s, t, add, lane);
    __syncthreads();
    const uint32_t sequence = ready >> 32;
    if (threadIdx.x == 0 && at::add_acq_rel_gpu(a.finished + source, 1) == gridDim.x - 1) {
      a.finished[source] = 0;
      a.times[source * kTimes + sequence % kTimes] =
          static_cast<uint32_t>(at::global_ns() - __ldcg(a.began + source));
      at::store_release_system(s.done, sequence);
    }
  }
}
