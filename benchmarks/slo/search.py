"""P90 goodput: the highest Poisson rate at which enough requests meet both latency targets.

As the ExpertPlex paper defines it: at least 90 % of all requests, those that failed included, meet
TTFT and TPOT. No servers here, so that the search is tested without any.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from vllm_expertplex.planner.workload import Targets

SHARE = 0.9  # of all requests


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
    requests: int  # that the shares are of


class Found(NamedTuple):
    """What `probes` tell."""

    probes: list[Probe]

    @property
    def fails(self) -> float:
        """The lowest rate that failed; infinity: none did."""
        return min((p.rate for p in self.probes if p.attainment.both < SHARE), default=math.inf)

    @property
    def goodput(self) -> float:
        """The highest rate that held, of those below all that failed; 0: none."""
        held = (p.rate for p in self.probes if p.attainment.both >= SHARE)
        return max((rate for rate in held if rate < self.fails), default=0.0)


def meets(request: Request, targets: Targets) -> tuple[bool, bool]:
    """TTFT, TPOT."""
    return (
        request.ok and request.ttft <= targets.ttft,
        request.ok and (request.tpot is None or request.tpot <= targets.tpot),
    )


def attainment(requests: Sequence[Request], targets: Targets) -> Attainment:
    """Raises ValueError for no requests at all."""
    if not requests:
        raise ValueError("no requests were sent")
    met = [meets(r, targets) for r in requests]
    first, rest = (sum(column) for column in zip(*met, strict=True))
    return Attainment(*(n / len(requests) for n in (first, rest, sum(a and b for a, b in met))))


def certain(met: int, missed: int, count: int) -> bool:
    """Whether `count` requests will, or will not, reach `SHARE` whatever the undecided ones do."""
    enough = math.ceil(SHARE * count)
    return met >= enough or missed > count - enough


def goodput(
    measure: Callable[[float], tuple[Attainment, int]],
    start: float,
    *,
    step: float = 2.0,
    precision: float = 0.05,
    lowest: float = 0.01,
    highest: float = 1000.0,
    most: int = 30,
    seconds: float = math.inf,
) -> Found:
    """The highest rate that was seen to reach `SHARE`, within `precision`.

    From `start` the rate is multiplied or divided, by `step` first and by at most 4 later, until
    two rates enclose the answer, which is then bisected by ratio. 0 where even `lowest` fails.
    After `most` rates the search ends where it is, and after `seconds` it begins no other.
    """
    found, rate = Found([]), start
    begun = time.monotonic()

    def over() -> bool:
        return len(found.probes) >= most or time.monotonic() - begun >= seconds

    while True:
        found.probes.append(Probe(rate, *measure(rate)))
        if over():
            break
        low, high = found.goodput, found.fails
        if low > 0 and high < math.inf:
            if high / low <= 1 + precision:
                break
            rate = (low * high) ** 0.5
            continue
        rate = high / step if low == 0 else low * step
        step = min(step**2, 4)
        if not lowest <= rate <= highest:
            break
    return Found(sorted(found.probes))
