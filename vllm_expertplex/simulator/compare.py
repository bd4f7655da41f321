"""Which serving mode suits a load: the goodput of each, simulated, and a sentence.

Owns: the comparison that `plan --compare` and `simulate --goodput` print. Must not know: parsing.
"""

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from vllm_expertplex.planner.plan import Plan
from vllm_expertplex.planner.setup import Setting
from vllm_expertplex.simulator.metrics import Estimate
from vllm_expertplex.simulator.runs import Case, goodput
from vllm_expertplex.simulator.steps import Knobs
from vllm_expertplex.simulator.systems import SYSTEMS
from vllm_expertplex.simulator.systems.base import CannotServe

MEANING = {
    "expertplex": "ExpertPlex",
    "pdd": "prefill-decode disaggregation, half the GPUs each",
    "green-context": "SM-partitioned colocation, tensor-parallel attention",
    "colocated": "colocated, prefill first",
    "chunked": "colocated, chunked prefill",
    "asyncep": "AsyncEP (prefill-only)",
}


class Outcome(msgspec.Struct, frozen=True):
    """One mode: its simulated goodput, or why it cannot serve."""

    mode: str
    goodput: Estimate | None
    reason: str = ""


def compare_modes(
    setting: Setting,
    gpus: int,
    plan: Plan | None,
    modes: list[str],
    seeds: int,
    console: Console,
    longest: int | None = None,
    knobs: dict[str, Knobs] | None = None,
    options: dict[str, dict[str, object]] | None = None,
    seconds: float = 60.0,
) -> list[Outcome]:
    """Simulate the goodput of each mode, with a progress bar. Best first."""
    guess = plan.goodput if plan else 1.0
    outcomes = []
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("simulating", total=len(modes) * seeds * 9)
        for done, mode in enumerate(modes, start=1):
            bar.update(task, description=f"simulating {mode}")
            extra = {"plan": plan} if mode == "expertplex" else (options or {}).get(mode, {})
            case = Case(
                setting=setting,
                gpus=gpus,
                mode=mode,
                knobs=(knobs or {}).get(mode, Knobs()),
                options=dict(extra),
                longest=longest,
                seconds=seconds,
            )
            try:
                found = goodput(case, seeds, guess, progress=lambda: bar.advance(task))
                outcomes.append(Outcome(mode, found))
            except CannotServe as error:
                outcomes.append(Outcome(mode, None, str(error)))
            bar.update(task, completed=done * seeds * 9)
    return sorted(outcomes, key=lambda o: -(o.goodput.mean if o.goodput else -1.0))


def table(outcomes: list[Outcome], gpus_per_node: int, gpus: int) -> Table:
    """The outcomes as a table, per deployment and per node."""
    shown = Table(title="Goodput by serving mode (SIMULATED, req/s, 95 % interval over seeds)")
    for name in ("mode", "deployment", "per node", "against the best", "note"):
        left = name in ("mode", "note")
        shown.add_column(name, justify="left" if left else "right", overflow="fold")
    best = max((o.goodput.mean for o in outcomes if o.goodput), default=0.0)
    nodes = max(1.0, gpus / gpus_per_node)
    for o in outcomes:
        if o.goodput is None:
            shown.add_row(MEANING[o.mode], "-", "-", "-", o.reason)
            continue
        ratio = f"{o.goodput.mean / best:.2f}x" if best else "-"
        missed = "" if o.goodput.mean else "keeps the targets at no rate"
        shown.add_row(
            MEANING[o.mode], str(o.goodput), f"{o.goodput.mean / nodes:.3g}", ratio, missed
        )
    return shown


def advice(outcomes: list[Outcome]) -> str:
    """One sentence: what to use. A lead within 5 % or within the intervals is called a tie."""
    served = [o for o in outcomes if o.goodput and o.goodput.mean > 0]
    if not served:
        return "No serving mode keeps these targets on these GPUs."
    best, *rest = served
    assert best.goodput
    ties = [
        o
        for o in rest
        if o.goodput
        and (
            o.goodput.mean > best.goodput.mean * 0.95
            or (
                len(o.goodput.values) > 1
                and best.goodput.mean - o.goodput.mean
                < best.goodput.half_width + o.goodput.half_width
            )
        )
    ]
    text = f"For this load the simulation favours {MEANING[best.mode]}"
    if ties:
        text += f"; {', '.join(MEANING[o.mode] for o in ties)} cannot be told apart from it"
    elif rest and rest[0].goodput:
        lead = best.goodput.mean / rest[0].goodput.mean
        text += f", {lead:.2f}x the next ({MEANING[rest[0].mode]})"
    if best.mode != "expertplex":
        text += ". ExpertPlex is not the best choice here"
    return text + ". The model has no launch jitter and ideal baselines: measure before deciding."


def compare(setting: Setting, gpus: int, plan: Plan, console: Console, seeds: int = 2) -> None:
    """What `plan --compare` prints."""
    prefill_only = setting.workload.mean_output <= 1
    modes = [m for m in SYSTEMS if prefill_only or m != "asyncep"]
    outcomes = compare_modes(setting, gpus, plan, modes, seeds, console)
    console.print(table(outcomes, setting.gpu.gpus_per_node, gpus))
    console.print(advice(outcomes))
