"""`vllm-expertplex simulate`. Owns: its options, tables and progress. Must not know: the model."""

import argparse
import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from vllm_expertplex.planner.cli import find_plan
from vllm_expertplex.planner.plan import Plan, read_plan
from vllm_expertplex.planner.setup import Setting, add_setting_arguments, setting_from
from vllm_expertplex.planner.workload import read_trace
from vllm_expertplex.simulator.compare import MEANING, advice, compare_modes, table
from vllm_expertplex.simulator.metrics import Summary
from vllm_expertplex.simulator.requests import Requests, cut
from vllm_expertplex.simulator.runs import Case, replay, simulate
from vllm_expertplex.simulator.systems import SYSTEMS
from vllm_expertplex.simulator.systems.base import CannotServe

HELP = "simulate a deployment, past the machines at hand; compare serving modes"
EPILOG = """examples:
  vllm-expertplex simulate minimax-m2.7 --gpu h800 --rates 10,20,40
  vllm-expertplex simulate minimax-m2.7 --modes expertplex,pdd --goodput --seeds 3
  vllm-expertplex simulate minimax-m2.7 --plan plan.json --trace azure.csv --plot curve.png
  vllm-expertplex simulate minimax-m2.7 --rates 20 --event 20:fail:decode --event 40:add:prefill
Every figure printed is simulated; none is measured."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_setting_arguments(parser)
    parser.add_argument(
        "--modes", default="expertplex", help=f"comma-separated, or all: {', '.join(SYSTEMS)}"
    )
    parser.add_argument("--plan", metavar="FILE", help="ExpertPlex plan (default: plan one now)")
    parser.add_argument("--layout", help="ExpertPlex layout, e.g. 1P3D4E, instead of the best one")
    parser.add_argument("--rates", default="", help="requests/s, comma-separated")
    parser.add_argument("--goodput", action="store_true", help="find the highest rate in target")
    parser.add_argument("--trace", metavar="FILE", help="replay a trace with arrival times")
    parser.add_argument("--speed", type=float, default=1.0, help="play the trace this much faster")
    parser.add_argument("--requests", type=int, help="requests per run (default: 60 s of them)")
    parser.add_argument("--seeds", type=int, default=1, help="runs per point, 1 to 10")
    parser.add_argument("--longest", type=int, help="cut requests to this many tokens in all")
    parser.add_argument(
        "--event", action="append", default=[], metavar="SECONDS:fail|add:ROLE",
        help="a failure or an added server (prefill, decode, moe) during ExpertPlex runs",
    )  # fmt: skip
    parser.add_argument("--plot", metavar="FILE", help="draw SLO curves (PNG or SVG)")
    parser.add_argument("--json", metavar="FILE", help="write every run as JSON")


def run(args: argparse.Namespace) -> int:
    """Simulate and print. Returns 1 with a reason on stderr when the input is impossible."""
    try:
        return _run(args)
    except ValueError as error:
        print(f"vllm-expertplex simulate: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> int:
    if not 1 <= args.seeds <= 10:
        raise ValueError(f"--seeds {args.seeds}: expected 1 to 10")
    setting, console = setting_from(args), Console()
    modes = list(SYSTEMS) if args.modes == "all" else args.modes.split(",")
    for mode in modes:
        if mode not in SYSTEMS:
            raise ValueError(f"--modes {mode!r}: expected all, or some of {', '.join(SYSTEMS)}")
    plan: Plan | None = None
    if "expertplex" in modes:
        plan = read_plan(args.plan) if args.plan else None
        plan = plan or find_plan(setting, args.gpus, layout=args.layout)
        console.print(f"ExpertPlex runs as {plan.layout}, decode on {plan.decode_sms} SMs")
    if args.goodput:
        outcomes = compare_modes(
            setting, args.gpus, plan, modes, args.seeds, console, longest=args.longest
        )
        console.print(table(outcomes, setting.gpu.gpus_per_node, args.gpus))
        console.print(advice(outcomes))
        if args.json:
            Path(args.json).write_bytes(msgspec.json.format(msgspec.json.encode(outcomes)))
        return 0
    curves = _curves(args, setting, modes, plan, console)
    for mode, runs in curves.items():
        console.print(_table(MEANING[mode], runs))
    if args.plot:
        from vllm_expertplex.simulator.plots import slo_curves

        slo_curves(curves, args.plot, f"{setting.model.name}, {args.gpus} x {setting.gpu.name}")
        console.print(f"drawn to {args.plot}")
    if args.json:
        Path(args.json).write_bytes(msgspec.json.format(msgspec.json.encode(curves)))
    return 0


def _curves(
    args: argparse.Namespace, setting: Setting, modes: list[str], plan: Plan | None,
    console: Console,
) -> dict[str, list[Summary]]:  # fmt: skip
    rates = [float(r) for r in args.rates.split(",") if r]
    if not rates and not args.trace:
        base = plan.goodput if plan else 1.0
        rates = [round(base * part, 3) for part in (0.25, 0.5, 0.75, 1.0, 1.25)]
    curves: dict[str, list[Summary]] = {}
    points = 1 if args.trace else len(rates) * args.seeds
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("simulating", total=len(modes) * points)
        for mode in modes:
            bar.update(task, description=f"simulating {mode}")
            case = Case(
                setting=setting,
                gpus=args.gpus,
                mode=mode,
                options={"plan": plan} if mode == "expertplex" else {},
                longest=args.longest,
                events=_events(args.event) if mode == "expertplex" else [],
            )
            try:
                if args.trace:
                    requests, rate = _trace(args)
                    curves[mode] = [replay(case, requests, rate)]
                    bar.advance(task)
                else:
                    curves[mode] = []
                    for rate in rates:
                        for seed in range(args.seeds):
                            curves[mode].append(simulate(case, rate, seed, args.requests))
                            bar.advance(task)
            except CannotServe as error:
                curves.pop(mode, None)
                console.print(f"[yellow]{error}[/]")
    return curves


def _trace(args: argparse.Namespace) -> tuple[Requests, float]:
    inputs, outputs, times = read_trace(args.trace)
    if times is None:
        raise ValueError(f"trace {args.trace} has no arrival times; use it with --workload instead")
    count = args.requests or len(inputs)
    inputs, outputs = cut(inputs[:count], outputs[:count], args.longest)
    times = times[:count] / args.speed
    return Requests(times, inputs, outputs), count / max(float(times[-1]), 1e-9)


def _events(texts: list[str]) -> list[tuple[float, str, str]]:
    events = []
    for text in texts:
        time, _, rest = text.partition(":")
        action, _, role = rest.partition(":")
        if action not in ("fail", "add") or role not in ("prefill", "decode", "moe"):
            raise ValueError(f"--event {text!r}: expected SECONDS:fail|add:prefill|decode|moe")
        events.append((float(time), action, role))
    return events


def _table(title: str, runs: list[Summary]) -> Table:
    shown = Table(title=f"{title} (SIMULATED)")
    for name in ("req/s", "in target", "TTFT p50/p90/p99 (ms)", "TPOT p50/p90/p99 (ms)", "note"):
        shown.add_column(name, justify="left" if name == "note" else "right")
    for r in runs:
        ttft, tpot = (
            "/".join(f"{t * 1e3:.0f}" if t < 1e6 else "-" for t in times)
            for times in (
                (r.ttft_p50, r.ttft_p90, r.ttft_p99),
                (r.tpot_p50, r.tpot_p90, r.tpot_p99),
            )
        )
        notes = [f"{r.refused} too long"] if r.refused else []
        if r.finished < 1:
            notes.append(f"{1 - r.finished:.1%} unfinished")
        shown.add_row(f"{r.rate:.4g}", f"{r.attained:.1%}", ttft, tpot, ", ".join(notes))
    return shown
