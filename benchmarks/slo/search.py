"""P90 goodput: the highest Poisson rate at which enough requests meet both latency targets.

As the ExpertPlex paper defines it: at least 90 % of all requests, those that failed included, meet
TTFT and TPOT. No servers here, so that the search is tested without any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from vllm_expertplex.planner.workload import Targets


class Request(NamedTuple):
    """One request's latencies in seconds; `tpot` is None for a single token."""

    ok: bool
    ttft: float
    tpot: float | None


class Attainment(NamedTuple):
    """Shares of all requests that met a target, from 0 to 1."""

    ttft: float
    tpot: float
    both: float


class Probe(NamedTuple):
    rate: float  # requests per second
    attainment: Attainment


def attainment(requests: Sequence[Request], targets: Targets) -> Attainment:
    """Raises ValueError for no requests at all."""
    if not requests:
        raise ValueError("no requests were sent")
    first = [r.ok and r.ttft <= targets.ttft for r in requests]
    rest = [r.ok and (r.tpot is None or r.tpot <= targets.tpot) for r in requests]
    both = [a and b for a, b in zip(first, rest, strict=True)]
    return Attainment(*(sum(met) / len(requests) for met in (first, rest, both)))


def goodput(
    measure: Callable[[float], Attainment],
    start: float,
    *,
    share: float = 0.9,
    precision: float = 0.05,
    lowest: float = 0.01,
    highest: float = 1000.0,
    most: int = 30,
) -> tuple[float, list[Probe]]:
    """The highest rate that was seen to reach `share`, within `precision`, and all probes by rate.

    From `start` the rate doubles or halves until two rates enclose the answer, which is then
    bisected by ratio. 0 where even `lowest` fails. After `most` rates the search ends where it is.
    """
    probes: list[Probe] = []

    def enough(rate: float) -> bool:
        probes.append(Probe(rate, measure(rate)))
        return probes[-1].attainment.both >= share

    low, high = 0.0, float("inf")
    rate = start
    while True:
        if enough(rate):
            low = rate
        else:
            high = rate
        if low == 0:
            rate = high / 2
        elif high == float("inf"):
            rate = low * 2
        else:
            break
        if not lowest <= rate <= highest or len(probes) >= most:
            return low, sorted(probes)
    while high / low > 1 + precision and len(probes) < most:
        middle = (low * high) ** 0.5
        if enough(middle):
            low = middle
        else:
            high = middle
    return low, sorted(probes)
