"""CUDA graphs of torch work, for timing. Owns: the capture. Must not know: what is timed."""

from __future__ import annotations

from collections.abc import Callable

import torch


def captured(work: Callable[[], object], first: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`work` as a graph. `first` runs before, outside of it: it loads the kernels that `work`
    launches, which a capture does not allow.
    """
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        first()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        work()
    return graph


def captured_times(work: Callable[[], object], times: int) -> torch.cuda.CUDAGraph:
    """`work`, `times` times one after another, as a graph."""

    def whole() -> None:
        for _ in range(times):
            work()

    return captured(whole, work)
