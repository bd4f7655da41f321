"""Figs. 7-10 of the ExpertPlex paper, SIMULATED, beside the paper's ratios.

    python benchmarks/simulator_paper.py --json results.json --plots docs/figures

Two parts. Uncalibrated: the latency model as it is. Fitted: knobs, one for every serving mode and
each named in the output, are fitted to the five rates of Fig. 7 and carried to Figs. 8-10
unchanged. Fig. 7 with fitted knobs is therefore a fit and no prediction.

Length statistics are assumed (the paper gives none); lengths are capped at the KV capacity of the
mode that has least.
"""

import argparse
import math
from typing import NamedTuple

from _report import Row, write
from rich.console import Console
from rich.table import Table

from vllm_expertplex.planner.cli import find_plan
from vllm_expertplex.planner.setup import Setting, setting
from vllm_expertplex.simulator.compare import MEANING
from vllm_expertplex.simulator.metrics import Estimate
from vllm_expertplex.simulator.requests import poisson
from vllm_expertplex.simulator.runs import Case, goodput, simulate
from vllm_expertplex.simulator.steps import Knobs
from vllm_expertplex.simulator.systems import build
from vllm_expertplex.simulator.systems.base import CannotServe


class Figure(NamedTuple):
    """One figure: deployment, targets, and the paper's ExpertPlex-over-baseline ratios."""

    name: str
    model: str
    workload: str
    ttft: float
    tpot: float
    gpus: int
    baseline_gpus: int
    chunk: int
    ratios: dict[str, float | None]  # None: the paper states none


FIGURES = (
    Figure("Fig. 7 M2.7 ShareGPT", "minimax-m2.7", "sharegpt", 1, 0.05, 8, 8, 2048,
           {"chunked": 5.65, "colocated": 2.72, "pdd": 2.01, "green-context": 1.41}),
    Figure("Fig. 8 M2.7 LooGLE-like", "minimax-m2.7", "long-input", 10, 0.1, 8, 8, 2048,
           {"chunked": math.inf, "colocated": 4.12, "pdd": None, "green-context": 1.28}),
    Figure("Fig. 9 GLM-5.1 ShareGPT", "glm-5.1-fp8", "sharegpt", 2, 0.1, 24, 16, 4096,
           {"chunked": 3.3, "colocated": 1.5, "green-context": 1.0}),
    Figure("Fig. 10 GLM-5.1 LooGLE-like", "glm-5.1-fp8", "long-input", 20, 0.1, 24, 16, 4096,
           {"chunked": 5.0, "colocated": 2.5, "green-context": 1.66}),
)  # fmt: skip
FIG_7_RATES = {
    "expertplex": 11.3, "pdd": 5.62, "green-context": 8.01, "colocated": 4.15, "chunked": 2.00,
}  # fmt: skip
NODE = 8


def case(figure: Figure, given: Setting, mode: str, knobs: Knobs, longest: int | None) -> Case:
    options: dict[str, object] = {}
    if mode == "expertplex":
        options["plan"] = find_plan(given, figure.gpus)
    elif mode == "chunked":
        options["chunk"] = figure.chunk
    gpus = figure.gpus if mode == "expertplex" else figure.baseline_gpus
    return Case(
        setting=given, gpus=gpus, mode=mode, knobs=knobs, options=options, longest=longest,
        seconds=60.0, least=300,
    )  # fmt: skip


def capacity(figure: Figure, given: Setting, knobs: dict[str, Knobs]) -> int:
    """KV tokens that one request may use in the mode that has least room."""
    least = math.inf
    probe = poisson(given.workload, 1.0, 1, 0)
    for mode in figure.ratios:
        system = build(mode, given, figure.baseline_gpus, probe, knobs.get(mode, Knobs()))
        pool = getattr(system, "pool", None) or system.decode  # type: ignore[attr-defined]
        least = min(least, pool.capacity)
    return int(least)


def rates(
    figure: Figure, knobs: dict[str, Knobs], seeds: int
) -> tuple[int, dict[str, Estimate | None]]:
    """The cap on lengths, and goodput per node of every mode; None where the mode cannot run."""
    given = setting(figure.model, "h800", figure.workload, figure.ttft, figure.tpot)
    longest = capacity(figure, given, knobs)
    found: dict[str, Estimate | None] = {}
    guess = 8.0
    for mode in ("expertplex", *figure.ratios):
        built = case(figure, given, mode, knobs.get(mode, Knobs()), longest)
        try:
            total = goodput(built, seeds, guess)
        except CannotServe:
            found[mode] = None
            continue
        if mode == "expertplex":
            guess = max(total.mean / 2, 0.1)
        nodes = built.gpus / NODE
        found[mode] = Estimate(total.mean / nodes, total.half_width / nodes, total.values)
    return longest, found


def fit_knobs(console: Console) -> dict[str, Knobs]:
    """One knob a mode, bisected until Fig. 7's rate is met; the decode knob is common to all."""
    figure = FIGURES[0]
    given = setting(figure.model, "h800", figure.workload, figure.ttft, figure.tpot)

    def meets(mode: str, knobs: Knobs) -> bool:
        built = case(figure, given, mode, knobs, None)
        try:
            return simulate(built, FIG_7_RATES[mode], 0).attained >= 0.9
        except CannotServe:
            return False

    def largest(mode: str, make: object, top: float) -> float:
        low, high = 0.0, top
        for _ in range(12):
            middle = (low + high) / 2
            low, high = (middle, high) if meets(mode, make(middle)) else (low, middle)  # type: ignore[operator]
        return low

    decode = largest("expertplex", lambda v: Knobs(decode_layer=v), 1e-3)
    console.print(f"knob 1, all modes: +{decode * 1e6:.0f} us a layer of every decode iteration")
    pdd = largest("pdd", lambda v: Knobs(decode_layer=decode, kv_reserve=v), 8e9)
    console.print(f"knob 2, PDD: {pdd / 1e9:.2f} GB less KV a GPU")
    green = largest("green-context", lambda v: Knobs(decode_layer=decode + v), 1e-3)
    console.print(f"knob 3, SM partition: +{green * 1e6:.0f} us a layer of decode beyond knob 1")
    colocated = largest("colocated", lambda v: Knobs(v, decode), 1e-2)
    console.print(
        f"knob 4, colocated: +{colocated * 1e6:.0f} us a layer of every prefill iteration"
    )
    chunked = largest("chunked", lambda v: Knobs(v, decode), 1e-2)
    console.print(f"knob 5, chunked: +{chunked * 1e6:.0f} us a layer of every mixed step")
    return {
        "expertplex": Knobs(decode_layer=decode),
        "pdd": Knobs(decode_layer=decode, kv_reserve=pdd),
        "green-context": Knobs(decode_layer=decode + green),
        "colocated": Knobs(colocated, decode),
        "chunked": Knobs(chunked, decode),
    }


def show(
    title: str, knobs: dict[str, Knobs], seeds: int, console: Console, rows: list[Row]
) -> None:
    table = Table(title=f"{title} (SIMULATED)")
    for name in ("figure", "mode", "req/s per node", "ExpertPlex / mode", "paper"):
        table.add_column(name, justify="left" if name in ("figure", "mode") else "right")
    for figure in FIGURES:
        longest, found = rates(figure, knobs, seeds)
        ours = found["expertplex"]
        for mode, value in found.items():
            paper = figure.ratios.get(mode)
            ratio = math.nan
            if ours and value is not None:
                ratio = ours.mean / value.mean if value.mean else math.inf
            shown = "" if mode == "expertplex" else f"{ratio:.2f}"
            said = "-" if paper is None else "fails" if paper == math.inf else f"{paper:.2f}"
            said = "" if mode == "expertplex" else said
            table.add_row(
                f"{figure.name}, at most {longest} tokens" if mode == "expertplex" else "",
                MEANING[mode],
                str(value) if value else "does not fit",
                shown, said,
            )  # fmt: skip
            if mode != "expertplex":
                finite = ratio if math.isfinite(ratio) else -1.0
                known = paper if paper and math.isfinite(paper) else None
                rows.append(
                    Row(f"{title}: {figure.name}: ExpertPlex over {mode} (-1: infinite)", "x",
                        finite, known, "paper", None)
                )  # fmt: skip
    console.print(table)


def draw(folder: str, knobs: dict[str, Knobs], label: str) -> None:
    """SLO curves of Fig. 7."""
    from vllm_expertplex.simulator.plots import slo_curves

    figure = FIGURES[0]
    given = setting(figure.model, "h800", figure.workload, figure.ttft, figure.tpot)
    axis = (
        (1, 2, 3, 4, 6, 8, 10, 12, 15, 20)
        if knobs
        else (2, 5, 10, 20, 40, 60, 80, 100, 140, 180, 220)
    )
    curves = {
        mode: [simulate(case(figure, given, mode, knobs.get(mode, Knobs()), None), rate, 0)
               for rate in axis]
        for mode in FIG_7_RATES
    }  # fmt: skip
    slo_curves(curves, f"{folder}/simulator_fig7_{label}.png", f"{figure.name}, {label}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plots", metavar="FOLDER")
    args = parser.parse_args()
    console, rows = Console(), []
    show("Uncalibrated", {}, args.seeds, console, rows)
    knobs = fit_knobs(console)
    show("Knobs fitted to Fig. 7", knobs, args.seeds, console, rows)
    if args.plots:
        draw(args.plots, {}, "uncalibrated")
        draw(args.plots, knobs, "fitted")
    write("simulator_paper", rows, args.json)


if __name__ == "__main__":
    main()
