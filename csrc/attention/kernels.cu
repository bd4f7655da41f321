// The attention side's kernels. All arguments are by value, so that a CUDA graph captures them.
#include "attention/combine.cuh"
#include "attention/dispatch.cuh"

namespace at = expertplex::attention;

// Sizes of what `vllm_expertplex/comm/peer_kernels.py` mirrors.
extern "C" __device__ const uint32_t expertplex_attention_sizes[] = {
    sizeof(at::State), sizeof(at::Lost), sizeof(at::DispatchArguments),
    sizeof(at::CombineArguments)};

#define EXPERTPLEX_DISPATCH(name, fp8, loads)                         \
  extern "C" __global__ void __launch_bounds__(at::kThreads)          \
      name(const __grid_constant__ at::DispatchArguments arguments) { \
    at::dispatch<fp8, loads>(arguments);                              \
  }

EXPERTPLEX_DISPATCH(expertplex_dispatch_fp8, true, 3)
EXPERTPLEX_DISPATCH(expertplex_dispatch_bf16, false, 3)
EXPERTPLEX_DISPATCH(expertplex_dispatch_fp8_small, true, 1)
EXPERTPLEX_DISPATCH(expertplex_dispatch_bf16_small, false, 1)

extern "C" __global__ void __launch_bounds__(at::kMaxServers)
    expertplex_wait_done(const __grid_constant__ at::CombineArguments a) {
  at::wait_done(a);
}

extern "C" __global__ void __launch_bounds__(at::kThreads)
    expertplex_combine(const __grid_constant__ at::CombineArguments a) {
  at::combine<false, 4>(a);
}

extern "C" __global__ void __launch_bounds__(at::kThreads)
    expertplex_wait_and_combine(const __grid_constant__ at::CombineArguments a) {
  at::combine<true, 2>(a);
}
