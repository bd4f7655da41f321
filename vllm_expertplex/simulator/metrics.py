"""Latency percentiles, the part of requests within their targets, confidence intervals.

Owns: what is computed from finished requests. Must not know: systems.
"""

import math

import msgspec
import numpy as np

from vllm_expertplex.planner.workload import Targets
from vllm_expertplex.simulator.requests import Requests

WARM_UP = 0.1  # the first part of the requests meets empty queues and is not counted
# two-sided 95 % quantiles of Student's t by degrees of freedom
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated run. Times in seconds; percentiles over counted requests that finished."""

    rate: float
    requests: int
    finished: float
    refused: int
    attained: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    tpot_p50: float
    tpot_p90: float
    tpot_p99: float


def summarise(requests: Requests, rate: float, targets: Targets) -> Summary:
    """Percentiles and SLO attainment after the warm-up."""
    counted = slice(int(len(requests) * WARM_UP), None)
    ttft, tpot = requests.ttft[counted], requests.tpot[counted]
    done = np.isfinite(ttft) & np.isfinite(tpot)
    within = done & (ttft <= targets.ttft) & (tpot <= targets.tpot)

    def percentiles(values: np.ndarray) -> list[float]:
        if not done.any():
            return [math.inf] * 3
        return [float(p) for p in np.percentile(values[done], [50, 90, 99])]

    t, g = percentiles(ttft), percentiles(tpot)
    return Summary(
        rate=rate,
        requests=len(requests),
        finished=float(done.mean()),
        refused=requests.refused,
        attained=float(within.mean()),
        ttft_p50=t[0], ttft_p90=t[1], ttft_p99=t[2],
        tpot_p50=g[0], tpot_p90=g[1], tpot_p99=g[2],
    )  # fmt: skip


class Estimate(msgspec.Struct, frozen=True):
    """A mean over seeds and the half width of its 95 % confidence interval."""

    mean: float
    half_width: float
    values: list[float]

    def __str__(self) -> str:
        return f"{self.mean:.3g} ± {self.half_width:.2g}"


def estimate(values: list[float]) -> Estimate:
    """Student's t interval; one value has an infinite one. At most ten values."""
    if not 1 <= len(values) <= len(_T95) + 1:
        raise ValueError(f"found {len(values)} values, expected 1 to {len(_T95) + 1}")
    mean = float(np.mean(values))
    if len(values) == 1:
        return Estimate(mean, math.inf, values)
    spread = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(mean, _T95[len(values) - 2] * spread, values)
