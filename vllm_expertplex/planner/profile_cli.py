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
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from vllm_expertplex.planner.files import check_writable
from vllm_expertplex.planner.fit import Point, fit
from vllm_expertplex.planner.model_configs import load_model
from vllm_expertplex.planner.models import ModelSpec
from vllm_expertplex.planner.profile import Fit, MoeFit, Profile, write_profile
from vllm_expertplex.planner.profiler import Grid

HELP = "measure attention and MoE kernels of a model for the planner and the simulator"
EPILOG = """examples:
  vllm-expertplex profile minimax-m2.7 --output m2.7.json
  vllm-expertplex plan minimax-m2.7 --profile m2.7.json --gpus 8 --ttft 1 --tpot 0.05
  vllm-expertplex profile ./tiny-model --device cpu --output cpu.json
One layer is measured with random weights; times do not depend on the weights. On a Hopper GPU that
takes a minute; without one, it is measured on the CPU, for small models."""
ATTENTION = ("1", "x", "x s", "x s^2")
MOE = ("1", "x", "s")
LEAST_TOKENS = 128  # fewer make fewer points than a fit and its check need


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", help="catalogue name, directory or config.json")
    parser.add_argument("--output", "-o", metavar="FILE", default="profile.json")
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="a GPU if there is one"
    )
    parser.add_argument(
        "--most-tokens", type=int, help="largest prefill measured (default: GPU 8192, CPU 1024)"
    )
    cpu = parser.add_argument_group("on the CPU")
    cpu.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    cpu.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="torch threads of a whole server"
    )
    cpu.add_argument("--tile", type=int, default=16, help="rows of a tile (M_t of eq. 3)")


def run(args: argparse.Namespace) -> int:
    """Measure, fit, print the errors, write. Returns 2 with a reason on stderr."""
    try:
        _check(args)
        console = Console()
        begin = time.monotonic()
        write_profile(measure(args, console), args.output)
        seconds = time.monotonic() - begin
        console.print(f"measured in {seconds:.0f} s; written to {escape(args.output)}")
    except ValueError as error:
        print(f"vllm-expertplex profile: {error}", file=sys.stderr)
        return 2
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise ValueError for options that nothing can be measured with."""
    check_writable("--output", args.output)
    for name, least in (("threads", 1), ("tile", 1), ("most_tokens", LEAST_TOKENS)):
        value = getattr(args, name)
        if value is not None and value < least:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} {value}: expected {least} or more")


class Job(NamedTuple):
    """One component to measure and fit; `budget`: SMs (CPU: threads)."""

    name: str
    budget: int
    measure: Callable[[], Iterator[Point]]
    points: int
    terms: tuple[str, ...]


def measure(args: argparse.Namespace, console: Console) -> Profile:
    """Profile the model of the parsed options on a GPU or on this CPU."""
    import torch

    model = load_model(args.model)
    gpu = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    if gpu and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch finds no GPU here; use --device cpu")
    jobs = gpu_jobs(model, args) if gpu else cpu_jobs(model, args)
    fits: list[tuple[str, int, Fit]] = []
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("measuring", total=sum(job.points for job in jobs))
        for job in jobs:
            bar.update(task, description=f"{job.name}, {job.budget} {'SMs' if gpu else 'threads'}")
            found = []
            for point in job.measure():
                found.append(point)
                bar.advance(task)
            fits.append((job.name, job.budget, fit(found, job.terms)))
    console.print(_table(fits, "SMs" if gpu else "threads"))
    if gpu:
        from vllm_expertplex.planner.gpu_profiler import DECODE_TILE, PREFILL_TILE

        tiles = PREFILL_TILE, DECODE_TILE
    else:
        tiles = args.tile, args.tile
    return Profile(
        device=torch.cuda.get_device_name() if gpu else _processor(),
        model=model.name,
        date=datetime.date.today().isoformat(),
        hidden=model.hidden,
        expert_intermediate=model.expert_intermediate,
        sms=max(job.budget for job in jobs),
        prefill_tile=tiles[0],
        decode_tile=tiles[1],
        prefill_attention=fits[0][2],
        decode_attention=fits[1][2],
        moe=[MoeFit(phase=n.split()[1], sms=b, fit=f) for n, b, f in fits[2:]],
    )


def cpu_jobs(model: ModelSpec, args: argparse.Namespace) -> list[Job]:
    """Raises ValueError for a model that is too large for a CPU."""
    from vllm_expertplex.planner.profiler import CpuProfiler, cpu_grid

    size = 2 * model.experts * model.expert_parameters * 2
    if size > 8e9:
        raise ValueError(
            f"one MoE layer of {model.name} takes {size / 1e9:.0f} GB to measure on a CPU; profile "
            "a small model here, and plan this one from data sheets (leave --profile out)"
        )
    profiler, grid = CpuProfiler(model, args.dtype), cpu_grid(args.most_tokens or 1024)
    return _jobs(
        grid,
        sorted({1, args.threads}),
        partial(profiler.prefill, grid, args.threads),
        partial(profiler.decode, grid, args.threads),
        lambda phase, tokens, budget: profiler.moe(tokens, budget, args.tile),
    )


def gpu_jobs(model: ModelSpec, args: argparse.Namespace) -> list[Job]:
    """Raises ValueError for a model that cannot be measured on a GPU."""
    from vllm_expertplex.planner.gpu_profiler import GpuProfiler, gpu_grid

    profiler, grid = GpuProfiler(model), gpu_grid(args.most_tokens or 8192)
    budgets = [profiler.sms // 6 * 2, profiler.sms // 3 * 2, profiler.sms]
    prefill, decode = partial(profiler.prefill, grid), partial(profiler.decode, grid)
    return _jobs(grid, budgets, prefill, decode, profiler.moe)


def _jobs(
    grid: Grid,
    budgets: list[int],
    prefill: Callable[[], Iterator[Point]],
    decode: Callable[[], Iterator[Point]],
    moe: Callable[[str, tuple[int, ...], int], Iterator[Point]],
) -> list[Job]:
    return [
        Job("prefill attention", budgets[-1], prefill, len(grid.prefill), ATTENTION),
        Job("decode attention", budgets[-1], decode, len(grid.decode), ATTENTION[:3]),
        *(
            Job(f"MoE {phase}", budget, partial(moe, phase, tokens, budget), len(tokens), MOE)
            for phase, tokens in (("prefill", grid.prefill_tokens), ("decode", grid.decode_tokens))
            for budget in budgets
        ),
    ]


def _table(fits: list[tuple[str, int, Fit]], unit: str) -> Table:
    table = Table(title="Fits (one layer), error on points the fit did not see")
    for name in ("component", unit, "points", "held out", "mean error", "worst", "t ="):
        left = name in ("component", "t =")
        table.add_column(name, justify="left" if left else "right", overflow="fold")
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
