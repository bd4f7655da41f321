"""What gathering a layer costs: the copy engines' speed, and what computing beside them loses.

    python benchmarks/asyncep_copy.py [--model minimax-m2.7 qwen3-235b-a22b] [--json FILE]

Two processes on two GPUs do to each other what AsyncEP engines do: each has half of a layer's
experts in memory that the other opens through CUDA IPC, and pulls the whole layer into a buffer,
over and over. Peer copies beside each other; the peer of a figure is the same with one plain
`cuMemcpyAsync` for each run of bytes. bf16 products of 8192 x 8192 x 8192 stand for computing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _report import Row, write
from rich.console import Console
from rich.table import Table

# Routed experts of one layer: bytes in FP8, without scales.
LAYERS = {"minimax-m2.7": 256 * 3 * 3072 * 1536, "qwen3-235b-a22b": 128 * 3 * 4096 * 1536}
DEADLINE_S = 60.0
GATHERS, PRODUCTS, SIZE = 12, 40, 8192
LINK_FLOOR = 0.95  # of what a single peer copy reaches


def _engine(rank: int, folder: Path, layer_bytes: int, meet: Any, results: Any) -> None:
    """One of the two processes; puts its figures into `results`."""
    import torch
    from cuda.bindings import driver as cu

    from vllm_expertplex.asyncep.cuda_memory import CudaChannel, CudaMemory, PinnedMemory
    from vllm_expertplex.asyncep.memory import Pair
    from vllm_expertplex.cuda.driver import check

    class PlainChannel(CudaChannel):
        def copy(self, pairs: Sequence[Pair]) -> int:
            for target, source in pairs:
                stream = self._stream.cuda_stream
                check(cu.cuMemcpyAsync(target.address, source.address, source.size, stream), "copy")
            return sum(source.size for _, source in pairs)

    memory, half = CudaMemory(), layer_bytes // 2
    mine = memory.create(folder / f"{rank}", half)
    generator = torch.Generator("cuda").manual_seed(rank)
    memory.tensor(mine).random_(0, 256, generator=generator)
    torch.cuda.synchronize()
    meet.wait(DEADLINE_S)
    peer = memory.open(folder / f"{1 - rank}")
    whole = memory.buffer(layer_bytes)
    near, far = whole[rank * half : (rank + 1) * half], whole[(1 - rank) * half : (2 - rank) * half]
    pulls = {"peer": [(far, peer)], "own": [(near, mine)], "layer": [(far, peer), (near, mine)]}

    def seconds(channel: CudaChannel, pairs: list[Pair]) -> float:
        times = []
        for _ in range(GATHERS):
            begin = time.perf_counter()
            channel.copy(pairs)
            channel.finish()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def products() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(PRODUCTS):
            torch.mm(a, b)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / PRODUCTS * 1e-3

    def beside(channel: CudaChannel, pairs: list[Pair]) -> tuple[float, float]:
        """Seconds of a product, and of a copy, with both going on all the time."""
        begin = channel.mark()
        copies = 0
        for _ in range(3 * GATHERS):
            channel.copy(pairs)
            copies += 1
        end = channel.mark()
        product = products()
        channel.finish()
        return product, float(begin.elapsed_time(end)) / copies * 1e-3

    found: dict[str, Any] = {}

    def together(name: str, figure: Callable[[], Any]) -> None:
        meet.wait(DEADLINE_S)
        found[name] = figure()

    products()
    for kind, channel in (("ours", CudaChannel()), ("plain", PlainChannel())):
        for what, pairs in pulls.items():
            together(f"{kind} {what}", lambda c=channel, p=pairs: seconds(c, p))  # type: ignore[misc]
        for what, pairs in pulls.items():
            together(f"{kind} {what} beside", lambda c=channel, p=pairs: beside(c, p))  # type: ignore[misc]
    together("product", products)
    expected = torch.empty(half, dtype=torch.uint8, device="cuda")
    expected.random_(0, 256, generator=torch.Generator("cuda").manual_seed(1 - rank))
    found["right"] = bool(torch.equal(memory.tensor(far), expected))
    meet.wait(DEADLINE_S)
    pinned = PinnedMemory()
    host = pinned.create(folder / f"host-{rank}", half)
    host[:] = rank
    meet.wait(DEADLINE_S)
    theirs = pinned.open(folder / f"host-{1 - rank}")
    together("host", lambda: seconds(CudaChannel(), [(near, host)]))
    together("peer's host", lambda: seconds(CudaChannel(), [(near, theirs)]))
    found["right"] &= bool((memory.tensor(near) == 1 - rank).all())
    results.put((rank, found))
    meet.wait(DEADLINE_S)


def measure(layer_bytes: int) -> dict[str, Any]:
    """Rank 0's figures, in seconds."""
    context = multiprocessing.get_context("spawn")
    meet, results = context.Barrier(2), context.Queue()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        processes = []
        for rank in range(2):
            os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
            arguments = (rank, Path(folder), layer_bytes, meet, results)
            processes.append(context.Process(target=_engine, args=arguments))
            processes[-1].start()
        del os.environ["CUDA_VISIBLE_DEVICES"]
        try:
            found = dict(results.get(timeout=2 * DEADLINE_S) for _ in processes)
        finally:
            for process in processes:
                process.join(10)
                if process.is_alive():
                    process.kill()
    import torch  # noqa: F401  the report asks it for the GPUs' name

    if not all(figures["right"] for figures in found.values()):
        raise RuntimeError("copied bytes differ from their source")
    return dict(found[0])


def rows(model: str, size: int, found: dict[str, Any]) -> list[Row]:
    half, flops = size // 2, 2 * SIZE**3
    plain = "cuMemcpyAsync"

    def speed(name: str, what: str, amount: int, floor: float | None = None) -> Row:
        ours, peer = (amount / found[f"{kind} {what}"] / 1e9 for kind in ("ours", "plain"))
        return Row(f"{model}: {name}", "GB/s", ours, peer, plain, floor)

    found_rows = [
        speed("peer's half, both pull", "peer", half, LINK_FLOOR),
        speed("own half", "own", half),
        Row(
            f"{model}: whole layer",
            "ms",
            found["ours layer"] * 1e3,
            found["plain layer"] * 1e3,
            plain,
            None,
        ),
    ]
    for what in ("peer", "own", "layer"):
        for kind, label in (("ours", ""), ("plain", f", by {plain}")):
            product, copy = found[f"{kind} {what} beside"]
            name = {"peer": "peer's half", "own": "own half", "layer": "whole layer"}[what]
            rate, alone = flops / product / 1e12, flops / found["product"] / 1e12
            found_rows.append(
                Row(
                    f"{model}: products beside {name}{label}", "TFLOP/s", rate, alone, "alone", None
                )
            )
            found_rows.append(
                Row(f"{model}: {name} beside products{label}", "ms", copy * 1e3, None, "", None)
            )
    for what in ("host", "peer's host"):
        found_rows.append(
            Row(f"{model}: from {what} memory", "GB/s", half / found[what] / 1e9, None, "", None)
        )
    return found_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    result = [row for m in args.model for row in rows(m, LAYERS[m], measure(LAYERS[m]))]
    table = Table(title="Gathering one layer from two GPUs")
    for column in ("", "unit", "here", "peer", "", "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    for row in result:
        peer = "" if row.peer is None else f"{row.peer:.4g}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(row.name, row.unit, f"{row.ours:.4g}", peer, row.peer_name, ratio)
    Console(width=130).print(table)
    write("asyncep_copy", result, args.json)


if __name__ == "__main__":
    main()
