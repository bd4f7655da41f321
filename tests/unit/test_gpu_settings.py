"""What each role's CUDA graphs are made of."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CompilationConfig, CUDAGraphMode

from vllm_expertplex.layout import DECODE, PREFILL, Server
from vllm_expertplex.serve.gpu import fit


def fitted(role: str, mode: CUDAGraphMode) -> CompilationConfig:
    compilation = CompilationConfig(
        cudagraph_mode=mode, cudagraph_capture_sizes=[1, 2, 4], max_cudagraph_capture_size=4
    )
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(gpu_memory_utilization=0.9), compilation_config=compilation
    )
    fit(config, Server(role, 0), 0.5)
    assert config.cache_config.gpu_memory_utilization == 0.5
    return compilation


@pytest.mark.parametrize("mode", list(CUDAGraphMode))
def test_prefill_has_no_graphs_and_no_sizes_of_graphs(mode: CUDAGraphMode) -> None:
    compilation = fitted(PREFILL, mode)
    assert compilation.cudagraph_mode is CUDAGraphMode.NONE
    assert compilation.cudagraph_capture_sizes == []
    assert compilation.max_cudagraph_capture_size == 0


@pytest.mark.parametrize("mode", list(CUDAGraphMode))
def test_decode_keeps_its_graphs_of_decode_steps(mode: CUDAGraphMode) -> None:
    compilation = fitted(DECODE, mode)
    chosen = compilation.cudagraph_mode
    assert chosen is not None
    assert chosen.decode_mode() is mode.decode_mode()
    assert compilation.cudagraph_capture_sizes == [1, 2, 4]
    if mode is CUDAGraphMode.FULL_AND_PIECEWISE:
        assert chosen.mixed_mode() is CUDAGraphMode.NONE
    else:
        assert chosen is mode
