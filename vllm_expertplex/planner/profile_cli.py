"""`vllm-expertplex profile`. Owns: its options and flow. Must not know: shapes, fits."""

import argparse
import datetime
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from vllm_expertplex.planner.fit import Point, fit
from vllm_expertplex.planner.model_configs import load_model
from vllm_expertplex.planner.profile import Fit, MoeFit, Profile, write_profile

HELP = "measure attention and MoE kernels of a model for the planner and the simulator"
EPILOG = """examples:
  vllm-expertplex profile ./tiny-model --output cpu.json
  vllm-expertplex plan ./tiny-model --profile cpu.json --gpus 4 --workload 128/32 --ttft 5 --tpot 1
One layer is measured with random weights; times do not depend on the weights. This version
measures on the CPU, for small models; it has no GPU measurement yet."""
ATTENTION = ("1", "x", "x s", "x s^2")
MOE = ("1", "x", "s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", help="catalogue name, directory or config.json")
    parser.add_argument("--output", "-o", metavar="FILE", default="profile.json")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="torch threads of a whole server"
    )
    parser.add_argument("--tile", type=int, default=16, help="rows of a tile (M_t of eq. 3)")
    parser.add_argument("--most-tokens", type=int, default=1024, help="largest prefill measured")


def run(args: argparse.Namespace) -> int:
    """Measure, fit, print the errors, write. Returns 1 with a reason on stderr."""
    try:
        profile = measure(args, Console())
    except ValueError as error:
        print(f"vllm-expertplex profile: {error}", file=sys.stderr)
        return 1
    write_profile(profile, args.output)
    return 0


def measure(args: argparse.Namespace, console: Console) -> Profile:
    """Profile the model of the parsed options on this CPU."""
    from vllm_expertplex.planner.profiler import CpuProfiler, cpu_grid

    model = load_model(args.model)
    size = 2 * model.experts * model.expert_parameters * 2
    if size > 8e9:
        raise ValueError(
            f"one MoE layer of {model.name} takes {size / 1e9:.0f} GB to measure on a CPU; profile "
            "a small model here, and plan this one from data sheets (leave --profile out)"
        )
    profiler, grid = CpuProfiler(model, args.dtype), cpu_grid(args.most_tokens)
    budgets = sorted({1, args.threads})
    begin = time.monotonic()
    jobs: list[tuple[str, int, Callable[[], Iterator[Point]], int, tuple[str, ...]]] = [
        ("prefill attention", args.threads, partial(profiler.prefill, grid, args.threads),
         len(grid.prefill), ATTENTION),
        ("decode attention", args.threads, partial(profiler.decode, grid, args.threads),
         len(grid.decode), ATTENTION[:3]),
    ]  # fmt: skip
    for phase, tokens in (("prefill", grid.prefill_tokens), ("decode", grid.decode_tokens)):
        for budget in budgets:
            points = partial(profiler.moe, tokens, budget, args.tile)
            jobs.append((f"MoE {phase}", budget, points, len(tokens), MOE))
    fits: list[tuple[str, int, Fit]] = []
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("measuring", total=sum(job[3] for job in jobs))
        for name, budget, measured, _, terms in jobs:
            bar.update(task, description=f"{name}, {budget} threads")
            found = []
            for point in measured():
                found.append(point)
                bar.advance(task)
            fits.append((name, budget, fit(found, terms)))
    console.print(_table(fits))
    console.print(f"measured in {time.monotonic() - begin:.0f} s; written to {args.output}")
    return Profile(
        device=_processor(),
        model=model.name,
        date=datetime.date.today().isoformat(),
        hidden=model.hidden,
        expert_intermediate=model.expert_intermediate,
        sms=args.threads,
        prefill_tile=args.tile,
        decode_tile=args.tile,
        prefill_attention=fits[0][2],
        decode_attention=fits[1][2],
        moe=[MoeFit(phase=n.split()[1], sms=b, fit=f) for n, b, f in fits[2:]],
    )


def _table(fits: list[tuple[str, int, Fit]]) -> Table:
    table = Table(title="Fits (one layer), error on points the fit did not see")
    for name in ("component", "threads", "points", "held out", "mean error", "worst", "t ="):
        table.add_column(name, justify="left" if name in ("component", "t =") else "right")
    for name, budget, f in fits:
        formula = " + ".join(
            f"{c * 1e6:.3g} us" + ("" if t == "1" else f" {t}")
            for t, c in zip(f.terms, f.coefficients, strict=True)
            if c
        )
        table.add_row(
            name, str(budget), str(f.points), str(f.held_out_points),
            f"{f.held_out_mean_error:.1%}", f"{f.held_out_max_error:.1%}", formula,
        )  # fmt: skip
    return table


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} CPUs"
