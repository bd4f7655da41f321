"""Where the GPU's time goes in a decode step, from the traces of vLLM's own profiler.

Used by `goodput.py --speed`. A server started with `options(folder)` records some steps of each
worker when asked to; `breakdown` then splits a step's period by kind of kernel. A kernel counts
from the end of the one before it, so that overlapping launches are not counted twice, and what
none of them covers is `idle`.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
from apk.common import row

STEPS = 24
# The first pattern that matches names the kind.
KINDS = (
    ("dispatch", r"expertplex_dispatch"),
    ("MoE servers and combine", r"expertplex_(wait|combine)"),
    ("all-reduce", r"all_?reduce|cross_device_reduce|ncclDevKernel|multimem"),
    ("experts", r"fused_moe|grouped|m_grouped|moe|permute|silu|expert"),
    ("attention", r"flash|fmha|attn|paged|cache_kernel|reshape_and_cache|prepare_varlen"),
    ("routing", r"topk|sigmoid|router|grouping"),
    ("quantise", r"quant"),
    ("norm, rotary", r"norm|rotary|rope"),
    ("sampling", r"softmax|sample|argmax|exponential|sort|penalt|gumbel|div_true"),
    ("GEMM", r"gemm|cutlass|nvjet|cublas|splitK|sm90|matmul"),
)


class Breakdown(NamedTuple):
    """Per step, us: its period, and what it is spent on. `kernels`: the longest, by name."""

    steps: int
    period: float
    kinds: dict[str, float]
    kernels: dict[str, float]


def options(folder: Path) -> tuple[str, str]:
    """Of the server to be profiled."""
    config = {
        "profiler": "torch",
        "torch_profiler_dir": str(folder.resolve()),
        "torch_profiler_with_stack": False,
        "torch_profiler_activities": ["CUDA"],
        "torch_profiler_dump_cuda_time_total": False,
        "ignore_frontend": True,
        "delay_iterations": 40,  # until all requests decode
        "max_iterations": STEPS,
    }
    return "--profiler-config", json.dumps(config)


@contextmanager
def recording(base_url: str) -> Iterator[None]:
    """Workers record some of the steps that run meanwhile; beginning takes seconds."""
    with httpx.Client(base_url=base_url, timeout=120, trust_env=False) as http:
        http.post("/start_profile").raise_for_status()
        yield
        http.post("/stop_profile").raise_for_status()


def kind(kernel: str) -> str:
    for name, pattern in KINDS:
        if re.search(pattern, kernel, re.IGNORECASE):
            return name
    return "other"


def breakdown(trace: Path, layers: int) -> Breakdown | None:
    """Of one worker's trace; None where it holds no whole decode step. `layers` MoE layers."""
    data = trace.read_bytes()
    events = json.loads(gzip.decompress(data) if trace.suffix == ".gz" else data)["traceEvents"]
    kernels = sorted(
        (e["ts"], e["ts"] + e["dur"], e["name"])
        for e in events
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    # Something that each layer does once, in any system.
    for mark in ("reshape_and_cache", "FlashAttnFwd", "flash_fwd"):
        marks = [begin for begin, _, name in kernels if mark in name]
        if len(marks) > 2 * layers:
            break
    else:
        return None
    first = marks[::layers]
    begin, end = first[0], first[-1]
    kinds: Counter[str] = Counter()
    names: Counter[str] = Counter()
    last = begin
    for started, ended, name in kernels:
        if started < begin or started >= end:
            continue
        alone = min(ended, end) - max(started, last)
        if started > last:
            kinds["idle"] += started - last
        if alone > 0:
            kinds[kind(name)] += alone
            names[name[:80]] += alone
            last = min(ended, end)
    kinds["idle"] += max(0.0, end - last)
    steps = len(first) - 1
    return Breakdown(
        steps,
        (end - begin) / steps,
        {k: v / steps for k, v in kinds.most_common()},
        {k: v / steps for k, v in names.most_common(30)},
    )


def of_folder(folder: Path, layers: int) -> Breakdown | None:
    """The worker that recorded the most decode steps."""
    found = [breakdown(path, layers) for path in sorted(folder.rglob("*.pt.trace.json*"))]
    return max((b for b in found if b), key=lambda b: b.steps, default=None)


def rows(name: str, step: Breakdown) -> list[dict]:
    """Parts of a step, us, and their share of it."""

    def part(what: str, us: float) -> dict:
        return row(f"{name} step: {what}", "us", us, step.period, "the whole step, traced")

    return [
        *(part(what, us) for what, us in step.kinds.items()),
        *(part(f"kernel {kernel}", us) for kernel, us in step.kernels.items()),
    ]
