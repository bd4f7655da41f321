"""`vllm-expertplex simulate`. Owns: its options, tables and progress. Must not know: the model."""

import argparse
import math
import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from vllm_expertplex.planner.cli import find_plan
from vllm_expertplex.planner.files import check_writable, write
from vllm_expertplex.planner.impossible import Infeasible, exit_code
from vllm_expertplex.planner.plan import Plan, read_plan
from vllm_expertplex.planner.setup import Setting, add_setting_arguments, setting_from
from vllm_expertplex.planner.workload import Lengths, read_trace
from vllm_expertplex.simulator.compare import MEANING, advice, compare_modes, table
from vllm_expertplex.simulator.metrics import Summary
from vllm_expertplex.simulator.requests import Requests, Times, cut
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
Trace = tuple[Times, Lengths, Lengths]
_RANGES = (
    ("seeds", 1, 10), ("requests", 1, 10_000_000), ("longest", 2, 1_000_000_000),
    ("speed", 0.000001, 1_000_000),
)  # fmt: skip
_DEFAULTS: dict[str, object] = {
    "plan": None, "layout": None, "event": [], "rates": None, "trace": None, "requests": None,
    "plot": None, "seeds": 1, "speed": 1.0,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_setting_arguments(parser)
    parser.add_argument(
        "--modes", default="expertplex", help=f"comma-separated, or all: {', '.join(SYSTEMS)}"
    )
    parser.add_argument("--plan", metavar="FILE", help="ExpertPlex plan (default: plan one now)")
    parser.add_argument("--layout", help="ExpertPlex layout, e.g. 1P3D4E, instead of the best one")
    parser.add_argument("--rates", help="requests/s, comma-separated")
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
    """Simulate and print. Returns 1 when nothing can serve and 2 for bad usage, with a reason."""
    try:
        return _run(args)
    except ValueError as error:
        print(f"vllm-expertplex simulate: {error}", file=sys.stderr)
        return exit_code(error)


def _run(args: argparse.Namespace) -> int:
    modes = _modes(args.modes)
    _check(args, modes)
    rates, events, trace = _rates(args.rates), _events(args.event), _trace(args)
    setting, console = setting_from(args), Console()
    plan: Plan | None = None
    if "expertplex" in modes:
        plan = _plan(args, setting, console, alone=len(modes) == 1)
    if args.goodput:
        outcomes = compare_modes(
            setting, args.gpus, plan, modes, args.seeds, console, longest=args.longest
        )
        console.print(table(outcomes, setting.gpu.gpus_per_node, args.gpus))
        console.print(advice(outcomes))
        _write_json(args.json, outcomes)
        return 0
    cases = [
        Case(
            setting=setting,
            gpus=args.gpus,
            mode=mode,
            options={"plan": plan} if mode == "expertplex" else {},
            longest=args.longest,
            events=events if mode == "expertplex" else [],
        )
        for mode in modes
        if mode != "expertplex" or plan
    ]
    if rates is None:
        base = plan.goodput if plan else 1.0
        rates = [round(base * part, 3) for part in (0.25, 0.5, 0.75, 1.0, 1.25)]
    curves = _curves(args, cases, rates, trace, console)
    for mode, runs in curves.items():
        console.print(_table(MEANING[mode], runs))
    if args.plot is not None and curves:
        from vllm_expertplex.simulator.plots import slo_curves

        slo_curves(curves, args.plot, f"{setting.model.name}, {args.gpus} x {setting.gpu.name}")
        console.print(f"drawn to {escape(args.plot)}")
    _write_json(args.json, curves)
    return 0 if curves else 1


def _modes(text: str) -> list[str]:
    modes = list(SYSTEMS) if text == "all" else list(dict.fromkeys(text.split(",")))
    for mode in modes:
        if mode not in SYSTEMS:
            raise ValueError(f"--modes {mode!r}: expected all, or some of {', '.join(SYSTEMS)}")
    return modes


def _check(args: argparse.Namespace, modes: list[str]) -> None:
    """Raise ValueError for options out of range, dropped silently, or that cannot be written to."""
    for name, least, most in _RANGES:
        value = getattr(args, name)
        if value is not None and not least <= value <= most:
            raise ValueError(f"--{name} {value}: expected {least:,} to {most:,}")
    given = {name for name, default in _DEFAULTS.items() if getattr(args, name) != default}
    for names, why in (
        ("plan layout event" if "expertplex" not in modes else "", "is for the mode expertplex"),
        ("rates trace event requests plot" if args.goodput else "", "has no use with --goodput"),
        ("rates seeds" if args.trace is not None else "", "has no use with --trace"),
        ("speed" if args.trace is None else "", "is for --trace"),
    ):
        for name in names.split():
            if name in given:
                raise ValueError(f"--{name} {why}: leave it out")
    if {"plan", "layout"} <= given:
        raise ValueError("give --plan or --layout, not both")
    if args.plot is not None and Path(args.plot).suffix.lower() not in (".png", ".svg"):
        raise ValueError(f"--plot {args.plot!r}: expected a .png or .svg file")
    check_writable("--plot", args.plot)
    check_writable("--json", args.json)


def _plan(args: argparse.Namespace, setting: Setting, console: Console, alone: bool) -> Plan | None:
    """The plan to run ExpertPlex by; None where no layout serves and other modes are asked for."""
    if args.plan is not None:
        plan = read_plan(args.plan)
        asked = (setting.model.name, setting.gpu.name, args.gpus)
        if (plan.model, plan.gpu, plan.gpus) != asked:
            raise ValueError(
                f"plan {args.plan}: found {plan.model} on {plan.gpus} GPUs {plan.gpu}, expected "
                f"{asked[0]} on {asked[2]} GPUs {asked[1]}; give its own model, --gpus and --gpu"
            )
    else:
        try:
            plan = find_plan(setting, args.gpus, layout=args.layout)
        except Infeasible as error:
            if alone:
                raise
            console.print(f"[yellow]expertplex: {escape(str(error))}[/]")
            return None
        if plan.gpus != args.gpus:
            raise ValueError(
                f"layout {plan.layout} takes {plan.gpus} GPUs, found --gpus {args.gpus}; give "
                f"--gpus {plan.gpus}"
            )
    console.print(f"ExpertPlex runs as {plan.layout}, decode on {plan.decode_sms} SMs")
    return plan


def _curves(
    args: argparse.Namespace, cases: list[Case], rates: list[float], trace: Trace | None,
    console: Console,
) -> dict[str, list[Summary]]:  # fmt: skip
    """The runs of each mode that can serve; what cannot is printed with its reason."""
    curves: dict[str, list[Summary]] = {}
    points = 1 if trace else len(rates) * args.seeds
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("simulating", total=len(cases) * points)
        for case in cases:
            bar.update(task, description=f"simulating {case.mode}")
            runs = []
            try:
                if trace:
                    runs.append(replay(case, Requests(*trace), _rate(trace[0])))
                    bar.advance(task)
                else:
                    for rate in rates:
                        for seed in range(args.seeds):
                            runs.append(simulate(case, rate, seed, args.requests))
                            bar.advance(task)
                curves[case.mode] = runs
            except CannotServe as error:
                console.print(f"[yellow]{escape(str(error))}[/]")
    return curves


def _trace(args: argparse.Namespace) -> Trace | None:
    """Arrivals (seconds), prompt and output lengths of the trace to replay."""
    if args.trace is None:
        return None
    inputs, outputs, times = read_trace(args.trace)
    if times is None:
        raise ValueError(f"trace {args.trace} has no arrival times; use it with --workload instead")
    count = args.requests or len(inputs)
    return times[:count] / args.speed, *cut(inputs[:count], outputs[:count], args.longest)


def _rate(arrivals: Times) -> float:
    """Requests per second; infinite when all come at once."""
    return len(arrivals) / float(arrivals[-1]) if arrivals[-1] > 0 else math.inf


def _rates(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        rates = [float(rate) for rate in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(1e-6 <= rate <= 1e6 for rate in rates):
        raise ValueError(
            f"--rates {text!r}: expected requests per second, comma-separated, each 1e-6 to 1e6"
        )
    return rates


def _events(texts: list[str]) -> list[tuple[float, str, str]]:
    events = []
    for text in texts:
        time, _, rest = text.partition(":")
        action, _, role = rest.partition(":")
        try:
            seconds = float(time)
        except ValueError:
            seconds = math.nan
        roles = ("prefill", "decode", "moe")
        if not 0 <= seconds < math.inf or action not in ("fail", "add") or role not in roles:
            raise ValueError(f"--event {text!r}: expected SECONDS:fail|add:prefill|decode|moe")
        events.append((seconds, action, role))
    return events


def _write_json(path: str | None, value: object) -> None:
    if path is not None:
        write(path, msgspec.json.format(msgspec.json.encode(value)))


def _table(title: str, runs: list[Summary]) -> Table:
    shown = Table(title=f"{title} (SIMULATED)")
    for name in ("req/s", "in target", "TTFT p50/p90/p99 (ms)", "TPOT p50/p90/p99 (ms)", "note"):
        shown.add_column(name, justify="left" if name == "note" else "right", overflow="fold")
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
        rate = f"{r.rate:.4g}" if math.isfinite(r.rate) else "at once"
        shown.add_row(rate, f"{r.attained:.1%}", ttft, tpot, ", ".join(notes))
    return shown
