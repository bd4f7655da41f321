"""CUDA without a framework's help: driver calls, memory between processes, building kernels."""
