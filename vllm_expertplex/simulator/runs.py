"""One simulation, a sweep over rates, and the highest rate that keeps the targets.

Owns: how long to simulate and how to look for goodput. Must not know: output.
"""

from collections.abc import Callable

import msgspec

from vllm_expertplex.planner.setup import Setting
from vllm_expertplex.simulator.metrics import Estimate, Summary, estimate, summarise
from vllm_expertplex.simulator.requests import Requests, poisson
from vllm_expertplex.simulator.steps import Knobs
from vllm_expertplex.simulator.systems import build
from vllm_expertplex.simulator.systems.expertplex import ExpertPlex, schedule

ATTAINED = 0.90  # P90 goodput, as in the ExpertPlex paper


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What to simulate. `options` go to the serving mode (a plan, a chunk size).

    seconds: simulated length of the arrivals. longest: cap on prompt plus output tokens.
    events: (time, 'fail' or 'add', role) for ExpertPlex.
    """

    setting: Setting
    gpus: int
    mode: str
    knobs: Knobs = Knobs()
    options: dict[str, object] = {}
    seconds: float = 60.0
    least: int = 400
    most: int = 20000
    longest: int | None = None
    events: list[tuple[float, str, str]] = []


def simulate(case: Case, rate: float, seed: int, count: int | None = None) -> Summary:
    """Simulate Poisson arrivals at `rate` requests/s. Raises CannotServe."""
    count = count or int(min(case.most, max(case.least, rate * case.seconds)))
    requests = poisson(case.setting.workload, rate, count, seed, case.longest)
    return replay(case, requests, rate)


def replay(case: Case, requests: Requests, rate: float) -> Summary:
    """Simulate given requests; those unfinished long after the last arrival count as missed."""
    system = build(case.mode, case.setting, case.gpus, requests, case.knobs, **case.options)
    if case.events:
        if not isinstance(system, ExpertPlex):
            raise ValueError(f"failures and scaling are simulated for expertplex, not {case.mode}")
        last = requests.arrival[-1]
        if late := [time for time, *_ in case.events if time > last]:
            raise ValueError(
                f"an event at {late[0]:g} s comes after the last request, at {last:g} s: let it "
                "happen earlier, or simulate more requests"
            )
        schedule(system, system.clock, case.events)
    targets = case.setting.targets
    patience = 4 * (targets.ttft + targets.tpot * max(requests.outputs))
    system.run(requests.arrival[-1] + patience)
    return summarise(requests, rate, targets)


def goodput(
    case: Case,
    seeds: int,
    guess: float,
    precision: float = 0.02,
    progress: Callable[[], None] = lambda: None,
) -> Estimate:
    """Highest rate (requests/s of the deployment) at which 90 % keep both targets, over seeds.

    guess: where to begin; the answer does not depend on it. 0 when not even a sixty-fourth does.
    precision: relative step at which the search stops, and the least half width reported.
    """
    found = estimate([_goodput(case, seed, guess, precision, progress) for seed in range(seeds)])
    least = precision * found.mean
    return Estimate(found.mean, max(found.half_width, least), found.values)


def _goodput(
    case: Case, seed: int, guess: float, precision: float, progress: Callable[[], None]
) -> float:
    def good(rate: float) -> bool:
        progress()
        return simulate(case, rate, seed).attained >= ATTAINED

    low, high = 0.0, guess
    if good(guess):
        low = guess
        while good(high := low * 1.5):
            low = high
            if low > guess * 1e4:
                return low
    else:
        while not good(low := high / 2):
            high = low
            if low < guess / 64:
                return 0.0
    while high / low > 1 + precision:
        middle = (low + high) / 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low
