"""Prefill and decode rates of layouts: the largest feasible batches, and eq. (1)'s two terms.

Owns: MaxFeasibleBatch of Algorithm 1, for arrays of layouts at once. Must not know: which layouts
are tried (`search.py`), how times are modelled (`latency.py`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_expertplex.planner.latency import Latency, Parts
from vllm_expertplex.planner.memory import Memory
from vllm_expertplex.planner.workload import Targets, Workload

Array = NDArray[Any]


class Rate(NamedTuple):
    """Arrays: requests/s, the batch that gives it, and the index of its overlap mode."""

    rate: Array
    batch: Array
    overlap: NDArray[np.int64]


class Problem:
    """Prefill and decode rates for arrays of (servers, MoE servers, SM budget)."""

    def __init__(
        self, latency: Latency, memory: Memory, workload: Workload, targets: Targets
    ) -> None:
        self.latency, self.memory = latency, memory
        self.workload, self.targets = workload, targets
        a = latency.assumptions
        self.prefill_limit = a.ttft_share * targets.ttft
        self.decode_limit = a.tpot_share * targets.tpot
        self.context = workload.mean_input + workload.mean_output / 2
        self.kv_transfer = float(latency.network.kv_transfer(workload.mean_input))

    def prefill_parts(
        self, batch: Array, gpus: Array, moe: Array, q: Array, tp: int, overlap: str
    ) -> Parts:
        """T_p: prefill sees the SMs that decode's budget leaves (Algorithm 1 to the letter)."""
        sms = 1.0 - q / self.latency.moe_sms
        sources = np.maximum(1, gpus // tp)
        return self.latency.prefill(batch, self.workload.mean_input, sources, moe, sms, tp, overlap)

    def decode_parts(
        self, batch: Array, gpus: Array, moe: Array, q: Array, tp: int, overlap: str
    ) -> Parts:
        """T_d under contention: decode has its budget q."""
        sources, sms = np.maximum(1, gpus // tp), q / self.latency.moe_sms
        return self.latency.decode(batch, self.context, sources, moe, sms, tp, overlap)

    def prefill_rate(self, gpus: Array, moe: Array, q: Array, tp: int) -> Rate:
        """Largest B_p / T_p with T_p within the target; 0 where no batch is."""
        held = self.memory.requests(tp, self.workload.mean_input)
        cap = min(held, self.latency.assumptions.max_prefill_requests)
        sources = gpus // tp
        overlaps = self.latency.overlaps
        best = self._best(
            self.prefill_parts, overlaps, self.prefill_limit, sources, cap, gpus, moe, q, tp
        )
        return best._replace(rate=np.minimum(best.rate, sources / max(self.kv_transfer, 1e-12)))

    def decode_rate(self, gpus: Array, moe: Array, q: Array, tp: int) -> Rate:
        """Largest B_d / (T_d O) with T_d within the target; 0 where no batch is."""
        whole = self.workload.mean_input + self.workload.mean_output
        cap = min(self.memory.requests(tp, whole), self.latency.assumptions.decode_slots)
        sources = gpus // tp
        overlaps = self.latency.decode_overlaps
        best = self._best(
            self.decode_parts, overlaps, self.decode_limit, sources, cap, gpus, moe, q, tp
        )
        rate = best.rate / self.workload.mean_output
        return best._replace(rate=np.minimum(rate, sources / max(self.kv_transfer, 1e-12)))

    def _best(
        self,
        parts: Callable[..., Parts],
        overlaps: tuple[str, ...],
        limit: float,
        sources: Array,
        cap: int,
        gpus: Array,
        moe: Array,
        q: Array,
        tp: int,
    ) -> Rate:
        """Best overlap and batch: MaxFeasibleBatch of Algorithm 1 by bisection.

        Two batches can be best: the largest feasible one, and the largest feasible one that loads
        every server alike. Between two such even batches the rate only rises.
        """
        best = np.zeros(np.shape(gpus))
        batch = np.zeros(np.shape(gpus))
        which = np.zeros(np.shape(gpus), dtype=np.int64)
        for index, overlap in enumerate(overlaps):
            seconds = partial(_seconds, parts, gpus, moe, q, tp, overlap)
            fits = partial(_fits, seconds, limit)
            per_server = largest_that(
                partial(_fits_even, fits, sources), np.full_like(sources, cap)
            )
            even = sources * per_server
            largest = between(fits, even, np.minimum(even + sources, sources * cap))
            for count in (even, largest):
                rate = np.where(count > 0, count / seconds(count), 0.0)
                better = rate > best
                best = np.where(better, rate, best)
                batch = np.where(better, count, batch)
                which = np.where(better, index, which)
        return Rate(best, batch, which)


def _seconds(
    parts: Callable[..., Parts], gpus: Array, moe: Array, q: Array, tp: int, overlap: str, n: Array
) -> Array:
    return np.asarray(parts(np.maximum(n, 1.0), gpus, moe, q, tp, overlap).total)


def _fits(seconds: Callable[[Array], Array], limit: float, n: Array) -> NDArray[np.bool_]:
    return np.asarray(seconds(n) <= limit)


def _fits_even(fits: Callable[[Array], NDArray[np.bool_]], sources: Array, n: Array) -> Array:
    return fits(n * sources)


def largest_that(fits: Callable[[Array], NDArray[np.bool_]], most: Array) -> Array:
    """Largest integer n in [0, most] with fits(n), elementwise; fits is true up to some n."""
    return between(fits, np.zeros_like(most, dtype=float), most)


def between(fits: Callable[[Array], NDArray[np.bool_]], low: Array, high: Array) -> Array:
    """Largest integer n in [low, high] with fits(n) or n == low, elementwise."""
    low, high = np.asarray(low, dtype=float), np.asarray(high, dtype=float)
    while np.any(high > low):
        middle = np.ceil((low + high) / 2)
        ok = fits(middle)
        low, high = np.where(ok, middle, low), np.where(ok, high, middle - 1)
        high = np.maximum(low, high)
    return low
