// What the attention side's kernels and the host agree on: where a slot's parts lie, the words, the
// kernels' arguments. The same layout as `vllm_expertplex/comm/peer.py`, which explains it.
#pragma once

#include <cstdint>

namespace expertplex::attention {

constexpr uint32_t kMaxServers = 32;  // MoE servers; a token's servers are bits of one word
constexpr uint32_t kMaxExperts = 1024;
constexpr uint32_t kThreads = 512;
constexpr uint32_t kWarps = kThreads / 32;
constexpr uint32_t kScaleColumns = 128;  // of activations under one FP8 scale
constexpr uint32_t kDoneStride = 128;    // bytes between done words

// An attention server's own counters, in its GPU's memory: a CUDA graph replays what it captured,
// so what changes from one operation to the next must not be a kernel argument.
struct State {
  uint32_t sequence;  // of the latest operation; never 0 once there was one
  uint32_t arrived;   // CTAs of the dispatch in flight that are done; zero between
  uint32_t lost;      // 1 once a MoE server has missed a deadline: no later wait waits
  uint32_t reserved;
};

// Where a wait tells the host what it waited for in vain. Host memory; zero while all is well.
struct Lost {
  uint32_t servers;  // bit z: MoE server z
  uint32_t layer, sequence, tokens;
};

// Byte offsets in a slot.
struct Offsets {
  uint64_t tokens, scales, ids, weights, result;
};

struct Peers {
  uint8_t* slots[kMaxServers];  // on the MoE servers' GPUs
  uint8_t* done;                // done words, on this GPU
  State* state;
  uint32_t* masks;  // [max_tokens]: bit z of masks[t]: token t has an expert on server z
  Lost* lost;
  Offsets at;
  uint32_t servers, hidden, topk, experts;
};

// One operation. `word`: phase << 31 | layer << 20 | tokens, the low half of the ready word.
struct DispatchArguments {
  Peers peers;
  const void* x;           // bf16 [tokens, hidden]
  const int32_t* ids;      // [tokens, topk]: global expert; negative: none
  const float* weights;    // [tokens, topk]
  const uint32_t* places;  // [experts]: server << 16 | slot there
  uint32_t tokens, word;
};

struct CombineArguments {
  Peers peers;
  void* out;  // bf16 [tokens, hidden]
  uint64_t timeout_ns;
  uint32_t tokens, word;
};

}  // namespace expertplex::attention
