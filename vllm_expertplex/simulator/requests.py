"""Requests: when they come, how long they are, and what happened to them.

Owns: arrival processes and per-request results. Must not know: systems.
"""

import numpy as np
from numpy.typing import NDArray

from vllm_expertplex.planner.workload import Lengths, Workload

Times = NDArray[np.float64]
NEVER = float("inf")


class Requests:
    """Parallel lists over requests in order of arrival; times in seconds, `NEVER` until set."""

    def __init__(self, arrival: Times, inputs: Lengths, outputs: Lengths) -> None:
        self.arrival: list[float] = arrival.tolist()
        self.inputs: list[int] = inputs.tolist()
        self.outputs: list[int] = outputs.tolist()
        self.first = [NEVER] * len(self.arrival)
        self.finish = [NEVER] * len(self.arrival)
        self.refused = 0

    def __len__(self) -> int:
        return len(self.arrival)

    @property
    def ttft(self) -> Times:
        """[requests] arrival to first token."""
        return np.asarray(self.first) - np.asarray(self.arrival)

    @property
    def tpot(self) -> Times:
        """[requests] mean time of every later token; 0 for a single token."""
        later = np.maximum(np.asarray(self.outputs) - 1, 1)
        with np.errstate(invalid="ignore"):
            gap = (np.asarray(self.finish) - np.asarray(self.first)) / later
        gap = np.where(np.isfinite(self.first), gap, NEVER)
        return np.where((np.asarray(self.outputs) == 1) & np.isfinite(gap), 0.0, gap)


def poisson(
    workload: Workload, rate: float, count: int, seed: int, longest: int | None = None
) -> Requests:
    """`count` requests at `rate` per second; lengths beyond `longest` tokens in all are cut."""
    if rate <= 0:
        raise ValueError(f"request rate {rate}: expected a positive number per second")
    rng = np.random.default_rng(seed)
    inputs, outputs = workload.sample(count, rng)
    arrival = np.cumsum(rng.exponential(1.0 / rate, count))
    return Requests(arrival, *cut(inputs, outputs, longest))


def cut(inputs: Lengths, outputs: Lengths, longest: int | None) -> tuple[Lengths, Lengths]:
    """Cap prompt plus output at `longest` tokens, the prompt giving way first."""
    if longest is None:
        return inputs, outputs
    outputs = np.minimum(outputs, max(1, longest - 1))
    return np.minimum(inputs, np.maximum(1, longest - outputs)), outputs
