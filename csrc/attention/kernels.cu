// The attention side's kernels. All arguments are by value, so that a CUDA graph captures them.
#include "attention/combine.cuh"
#include "attention/dispatch.cuh"

namespace at = expertplex::attention;

// Sizes of what `vllm_expertplex/comm/structs.py` mirrors.
extern "C" __device__ const uint32_t expertplex_attention_sizes[] = {
    sizeof(at::State), sizeof(at::Lost), sizeof(at::DispatchArguments), sizeof(at::WaitArguments),
    sizeof(at::CombineArguments)};

extern "C" __global__ void __launch_bounds__(at::kThreads)
    expertplex_dispatch_fp8(const __grid_constant__ at::DispatchArguments a) {
  at::dispatch<true>(a);
}

extern "C" __global__ void __launch_bounds__(at::kThreads)
    expertplex_dispatch_bf16(const __grid_constant__ at::DispatchArguments a) {
  at::dispatch<false>(a);
}

extern "C" __global__ void __launch_bounds__(at::kMaxServers)
    expertplex_wait_done(const __grid_constant__ at::WaitArguments a) {
  at::wait_done(a);
}

extern "C" __global__ void __launch_bounds__(at::kThreads)
    expertplex_combine(const __grid_constant__ at::CombineArguments a) {
  at::combine(a);
}
