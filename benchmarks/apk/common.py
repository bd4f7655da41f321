"""What the kernel's benchmarks share: random operands, a float64 check, timing by graph replay,
results as a table.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table

from vllm_expertplex.cuda.graph import captured_times

if TYPE_CHECKING:  # needs CUDA's bindings, which not all who import this have
    from vllm_expertplex.moe_server.apk.kernel import RunTimes

HBM_TBPS, FP8_TFLOPS = 4.3, 1580.0  # measured on an H200: device copy, large FP8 product
MODELS = {"GLM-5.1": (6144, 2048), "M2.7": (3072, 1536)}  # hidden, intermediate


def random_fp8(rows: int, columns: int) -> torch.Tensor:
    out = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device="cuda")
    step = max(1, (1 << 28) // columns)
    for i in range(0, rows, step):
        part = out[i : i + step]
        part.copy_(torch.randn(part.shape, device="cuda", dtype=torch.float32))
    return out


def random_scales(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, device="cuda", dtype=torch.float32) * 0.02 + 0.005


def gemm_error(
    out: torch.Tensor,
    a: torch.Tensor,
    sfa: torch.Tensor,
    b: torch.Tensor,
    sfb: torch.Tensor,
    expert_rows: list[tuple[int, int]],
    samples: int = 48,
) -> float:
    """||out - ref|| / ||ref|| in float64 over sampled rows of every expert, all columns. a [R, k],
    sfa [k/128, R],
    b [E, n, k], sfb [E, n/128, k/128]; `expert_rows`: (first row, rows) per expert."""
    wrong = right = 0.0
    for e, (first, count) in enumerate(expert_rows):
        if count == 0:
            continue
        rows = torch.randperm(count, device="cuda")[:samples].sort().values
        rows = torch.unique(torch.cat([rows, torch.tensor([0, count - 1], device="cuda")])) + first
        x = a[rows].double() * sfa[:, rows].t().double().repeat_interleave(128, 1)
        w = b[e].double() * sfb[e].double().repeat_interleave(128, 0).repeat_interleave(128, 1)
        ref = x @ w.t()
        wrong += float((out[rows].double() - ref).square().sum())
        right += float(ref.square().sum())
    return (wrong / right) ** 0.5


def graph_us(work: Callable[[], None], repeats: int = 10, replays: int = 7) -> float:
    """Median microseconds of one call, from CUDA graphs holding `repeats` calls."""
    graph = captured_times(work, repeats)
    graph.replay()
    return replay_us(graph, replays) / repeats


def replay_us(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Median microseconds of a graph."""
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def percentile(values: list[float], p: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(p / 100 * len(ordered)))]


def inside_us(results: Sequence[RunTimes]) -> float:
    """Median microseconds in the kernel, from submission to done, of runs of one operation."""
    return statistics.median((r.operations[0][2] - r.operations[0][0]) / 1e3 for r in results)


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Of a benchmark whose rows go to `report`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows here")
    return parser


def report(benchmark: str, rows: list[dict], path: Path | None) -> None:
    """Prints the rows as a table and, given a path, writes them as JSON."""
    table = Table(title=f"{benchmark} on {torch.cuda.get_device_name()}")
    for column in ("name", "unit", "floor", "ours", "peer", "peer_name", "ratio"):
        table.add_column(column)
    for r in rows:
        cells = [r.get(c) for c in ("name", "unit", "floor", "ours", "peer", "peer_name", "ratio")]
        table.add_row(
            *(
                f"{x:.4g}" if isinstance(x, float) else str(x if x is not None else "")
                for x in cells
            )
        )
    Console(width=150).print(table)
    if path:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True
        ).stdout.strip()
        result = {
            "benchmark": benchmark,
            "date": datetime.date.today().isoformat(),
            "device": torch.cuda.get_device_name(),
            "commit": commit,
            "command": "python " + " ".join(sys.argv),
            "rows": rows,
        }
        path.write_text(json.dumps(result, indent=1))


def row(
    name: str,
    unit: str,
    ours: float,
    peer: float | None = None,
    peer_name: str = "",
    floor: float | None = None,
) -> dict:
    """`ratio` is ours / peer."""
    return {
        "name": name,
        "unit": unit,
        "ours": ours,
        "peer": peer,
        "peer_name": peer_name,
        "ratio": ours / peer if peer else None,
        "floor": floor,
    }
