// Attention servers for tests and benchmarks of the resident kernel: each block is one, and keeps
// one operation after the other in flight in its slot, checking what comes back bit for bit.
#include <cstdint>

struct Section {
  uint64_t offset, row_bytes;
};
struct Client {
  uint8_t* slot;            // on the MoE GPU
  const uint64_t* done;     // here
  const uint8_t* inputs;    // [variants, inputs_bytes]: sections as in the slot, at the same offsets
  const uint8_t* expected;  // [variants, layers, phases, max_tokens, result row], or null
  uint64_t* took_ns;        // [operations]: ready to done
  uint32_t* kind;           // [operations]: phase << 31 | tokens
  uint64_t inputs_bytes, gap_ns, timeout_ns;
  Section section[4], result;
  uint32_t max_tokens[2];  // of an operation, by phase; 0: none of that phase
  uint32_t variants, layers, capacity, operations, seed, seq;
  uint32_t fixed;  // 1: always the most tokens, layers one after the other
};
struct Outcome {
  uint32_t done, wrong, timed_out, seq;
};

__device__ uint64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
__device__ uint32_t draw(uint32_t& state) {  // xorshift
  state ^= state << 13, state ^= state >> 17, state ^= state << 5;
  return state;
}

extern "C" __global__ void clients(const Client* all, Outcome* outcomes) {
  const Client& c = all[blockIdx.x];
  uint32_t random = c.seed, wrong = 0, seq = c.seq, n = 0;
  __shared__ uint32_t late;
  if (threadIdx.x == 0) late = 0;
  for (; n < c.operations; ++n) {
    uint32_t phase = draw(random) & 1;
    if (c.max_tokens[phase] == 0) phase ^= 1;
    const uint32_t most = c.max_tokens[phase];
    const uint32_t tokens = c.fixed ? most : 1 + draw(random) % most;
    const uint32_t layer = (c.fixed ? n : draw(random)) % c.layers;
    const uint32_t variant = draw(random) % c.variants;
    const uint8_t* from = c.inputs + variant * c.inputs_bytes;
    for (const Section& s : c.section) {
      const auto* src = reinterpret_cast<const uint32_t*>(from + s.offset);
      auto* dst = reinterpret_cast<uint32_t*>(c.slot + s.offset);
      for (uint64_t i = threadIdx.x; i < tokens * s.row_bytes / 4; i += blockDim.x) dst[i] = src[i];
    }
    auto* result = reinterpret_cast<uint32_t*>(c.slot + c.result.offset);
    const uint64_t words = tokens * c.result.row_bytes / 4;
    for (uint64_t i = threadIdx.x; i < words; i += blockDim.x) result[i] = 0xffffffff;
    __threadfence_system();
    __syncthreads();
    seq = seq + 1 ? seq + 1 : 1;
    if (threadIdx.x == 0) {
      for (const uint64_t until = now_ns() + c.gap_ns; now_ns() < until;) {
      }
      const uint64_t began = now_ns();
      const uint64_t word = static_cast<uint64_t>(seq) << 32 | phase << 31 | layer << 20 | tokens;
      asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(c.slot), "l"(word) : "memory");
      uint64_t done = 0;
      do asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(done) : "l"(c.done) : "memory");
      while (done != seq && now_ns() < began + c.timeout_ns);
      c.took_ns[n] = now_ns() - began;
      c.kind[n] = phase << 31 | tokens;
      late = done != seq;
    }
    __syncthreads();
    if (late) break;
    if (c.expected == nullptr) continue;
    const uint64_t which = (variant * c.layers + layer) * 2 + phase;
    const auto* want =
        reinterpret_cast<const uint32_t*>(c.expected + which * c.capacity * c.result.row_bytes);
    for (uint64_t i = threadIdx.x; i < words; i += blockDim.x) wrong += __ldcv(result + i) != want[i];
  }
  wrong = __syncthreads_count(wrong);
  if (threadIdx.x == 0) outcomes[blockIdx.x] = {n, wrong, late, seq};
}
