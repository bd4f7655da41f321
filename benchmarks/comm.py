"""Dispatch, WaitDone and combine over NVLink, against the copy ceilings of the same run.

    python benchmarks/comm.py [--json FILE]

Two GPUs: an attention server's kernels on the first, a MoE server that echoes (it reads, converts
and stores every row, but multiplies nothing) on the second. Decode sizes run as a CUDA graph of 62
layers; `overhead` is what a layer costs beyond its payload at the copy engine's speed and the MoE
side's own time. Prefill sizes are measured kernel by kernel.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from apk.common import replay_us, report, row

from vllm_expertplex.comm.peer import SlotLayout
from vllm_expertplex.comm.peer_transport import PeerTransport
from vllm_expertplex.cuda.graph import captured
from vllm_expertplex.layout import PHASE_DECODE, PHASE_PREFILL, ExpertMap, Layout, SlotOwner

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gpu" / "echo"))
from harness import EchoServers

HIDDEN, TOPK, EXPERTS, LAYERS, TOKENS = 3072, 8, 256, 62, 8192
DECODE, REPLAYS = (1, 16, 64, 256), 50
OVERHEAD_US, LINK_SHARE = 8.0, 0.85  # what must hold at 64 tokens, and of the link at 8192


def copy_gbps(size: int) -> float:
    """The copy engine, first GPU to second."""
    here = torch.empty(size, dtype=torch.uint8, device="cuda:0")
    there = torch.empty(size, dtype=torch.uint8, device="cuda:1")
    us = median_us(lambda: there.copy_(here, non_blocking=True))
    return size / us / 1e3


def median_us(
    work: Callable[[], object],
    before: Callable[[], object] | None = None,
    after: Callable[[], object] | None = None,
    repeats: int = 21,
) -> float:
    """Median GPU time of `work`, run between `before` and `after`."""
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(500_000)  # so that launches are queued before they run
        if before:
            before()
        start.record()
        work()
        end.record()
        if after:
            after()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def operands(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(tokens, HIDDEN, device="cuda:0").bfloat16()
    ids = torch.rand(tokens, EXPERTS, device="cuda:0").argsort(1)[:, :TOPK].int()
    return x, torch.rand(tokens, TOPK, device="cuda:0"), ids


def decode_layer_us(end: PeerTransport, tokens: int) -> float:
    x, w, ids = operands(tokens)

    def layer(n: int) -> None:
        end.dispatch(x, w, ids, n, PHASE_DECODE)
        end.combine(tokens, torch.bfloat16)

    def step() -> None:
        for n in range(LAYERS):
            layer(n)

    us = replay_us(captured(step, lambda: layer(0)), REPLAYS)
    end.check()
    return us / LAYERS


def connect(scratch: Path, fp8: bool) -> tuple[EchoServers, PeerTransport]:
    layout = Layout.parse("1P1D1E")
    slot = SlotLayout(TOKENS, HIDDEN, TOPK, fp8)
    echo = EchoServers(scratch, str(layout), [slot, slot], device=1, ctas=60)
    ends = [
        PeerTransport(scratch, SlotOwner(me), layout, slot, ExpertMap.contiguous(EXPERTS, 1), 10)
        for me in layout.attention_servers
    ]
    ends[0].connect(60)
    echo.await_start()
    return echo, ends[0]


def rows_of(fp8: bool, ceiling: float) -> list[dict]:
    kind, rows, operations = "fp8" if fp8 else "bf16", [], [0]
    with tempfile.TemporaryDirectory() as scratch:
        echo, end = connect(Path(scratch), fp8)
        with echo:
            totals = []
            for tokens in DECODE:
                totals.append(decode_layer_us(end, tokens))
                operations.append(operations[-1] + LAYERS * REPLAYS + 1)
            rows = prefill_rows(end, kind, ceiling)
            times = echo.stop()[0][0]
    decode = []
    for tokens, total, (first, last) in zip(
        DECODE, totals, itertools.pairwise(operations), strict=True
    ):
        moe = statistics.median(times[first:last]) / 1e3
        payload = tokens * (HIDDEN * (1 if fp8 else 2) + HIDDEN * 2 + TOPK * 8) / ceiling / 1e3
        overhead, floor = total - moe - payload, OVERHEAD_US if tokens == 64 else None
        decode += [
            row(f"{kind} layer, {tokens} tokens", "us", total, moe + payload, "payload + MoE side"),
            row(f"{kind} overhead, {tokens} tokens", "us", overhead, floor=floor),
            row(f"{kind} MoE side, {tokens} tokens", "us", moe),
        ]
    return decode + rows


def prefill_rows(end: PeerTransport, kind: str, ceiling: float) -> list[dict]:
    x, w, ids = operands(TOKENS)

    def dispatch() -> None:
        end.dispatch(x, w, ids, 0, PHASE_PREFILL)

    def combine() -> None:
        end.combine(TOKENS, torch.bfloat16)

    def both() -> None:
        dispatch()
        combine()

    down = median_us(dispatch, after=combine)
    both_us = median_us(both)
    pull = median_us(combine, before=both)  # its wait finds the operation done
    end.check()
    pushed = HIDDEN + HIDDEN // 32 if kind == "fp8" else HIDDEN * 2
    rates = (
        TOKENS * (pushed + TOPK * 8) / down / 1e3,
        TOKENS * HIDDEN * 2 / pull / 1e3,
    )
    return [
        row(f"{kind} {name}, {TOKENS} tokens", "GB/s", rate, ceiling, "copy engine", LINK_SHARE)
        for name, rate in zip(("dispatch", "combine"), rates, strict=True)
    ] + [row(f"{kind} layer, {TOKENS} tokens", "us", both_us)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    if torch.cuda.device_count() < 2:
        raise SystemExit("two GPUs are needed, this machine has one or none")
    # In a process of its own: it needs a context on the second GPU, which the echo must not share.
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        ceiling = pool.submit(copy_gbps, 1 << 28).result()
    rows = [row("copy engine, 256 MiB", "GB/s", ceiling)]
    for fp8 in (True, False):
        rows += rows_of(fp8, ceiling)
    report("comm", rows, options.json)


if __name__ == "__main__":
    main()
