"""Decode beside long prefill on the CPU backend: preemption, its bound, coalescing, eq. (4).

    python benchmarks/preemption_cpu.py [--quick] [--json FILE]

Drives the backend directly, without vLLM. Latency of a decode operation, from submission to its
completion: alone, beside a prefill operation that is always in flight, and the same in order of
arrival (it waits until the prefill operation in flight is complete). Then preemption against
prefill length, what prefill loses, weights read by two decode servers, and what a slow decode
server costs a fast one. Needs an otherwise idle machine.
"""

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from _report import Row, write
from rich.console import Console
from rich.table import Table
from vllm_expertplex._scheduler import sm_budget

from vllm_expertplex.layout import PHASE_DECODE, PHASE_PREFILL
from vllm_expertplex.moe_server.backend import ExpertWeights, Operation
from vllm_expertplex.moe_server.backend_tiles import TileOptions, TilesBackend

EXPERTS, HIDDEN, INTERMEDIATE, TOPK = 16, 512, 256, 4
LAYERS = 8  # so that decode reads weights from memory, as a model of many layers does
DECODE_TOKENS = 16
PREFILL_TOKENS = 16_384
LENGTHS = (1024, 4096, 16_384, 65_536)
WINDOW_US = 300
UNCOUNTED = 6  # operations before each that is timed, so that the cores are awake

console = Console(width=110)


def layers() -> list[ExpertWeights]:
    torch.manual_seed(0)
    return [
        ExpertWeights(
            (torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN) * HIDDEN**-0.5).bfloat16(),
            (torch.randn(EXPERTS, HIDDEN, INTERMEDIATE) * INTERMEDIATE**-0.5).bfloat16(),
        )
        for _ in range(LAYERS)
    ]


def operation(tokens: int, phase: int, source: int) -> Operation:
    return Operation(
        source,
        phase,
        0,
        torch.randn(tokens, HIDDEN).bfloat16(),
        torch.rand(tokens, EXPERTS).argsort(-1)[:, :TOPK].int().contiguous(),
        torch.empty(tokens, TOPK, HIDDEN),
        lambda: None,
    )


class Client:
    """An attention server with one operation in flight."""

    def __init__(self, backend: TilesBackend, tokens: int, phase: int, source: int) -> None:
        self._backend = backend
        self._op = operation(tokens, phase, source)
        self._done = threading.Event()
        self._layer = self._end = 0

    def start(self) -> float:
        """Submit the next layer's operation; returns when that was."""
        self._done.clear()
        self._layer = (self._layer + 1) % LAYERS
        op = replace(self._op, layer=self._layer, complete=self._complete)
        begin = time.perf_counter()
        self._backend.submit([op])
        return begin

    def _complete(self) -> None:
        self._end = time.perf_counter()
        self._done.set()

    def wait(self) -> float:
        """When the operation was complete."""
        if not self._done.wait(60):
            self._backend.check()
            raise TimeoutError("an operation did not complete within 60 s")
        return self._end

    def run(self) -> float:
        begin = self.start()
        return self.wait() - begin


class Prefill:
    """Keeps one prefill operation in flight until left; `times` are those of whole operations."""

    def __init__(self, backend: TilesBackend, tokens: int) -> None:
        self.client = Client(backend, tokens, PHASE_PREFILL, source=0)
        self.times: list[float] = []
        self._stop = False
        self._thread = threading.Thread(target=self._loop)

    def _loop(self) -> None:
        while not self._stop:
            self.times.append(self.client.run())

    def __enter__(self) -> "Prefill":
        self.client.run()  # buffers have their size
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join()


def latencies(count: int, gap_s: float, once: Callable[[], float]) -> list[float]:
    """Sorted times of `count` operations at any moment of a prefill operation.

    Each follows a few that are not counted, as the layers of a decode step follow each other: the
    first after a pause would time how long the cores take to wake up, which prefill spares it.
    """
    out = []
    for k in range(count):
        time.sleep(gap_s * (0.5 + (k * 0.618) % 1))
        for _ in range(UNCOUNTED):
            once()
        out.append(once())
    return sorted(out)


def p50(values: list[float]) -> float:
    return statistics.median(values)


def p99(values: list[float]) -> float:
    return values[min(len(values) - 1, int(len(values) * 0.99))]


def decode_beside_prefill(backend: TilesBackend, count: int, rows: list[Row]) -> None:
    decode = Client(backend, DECODE_TOKENS, PHASE_DECODE, source=1)
    latencies(20, 0.001, decode.run)
    alone = latencies(count, 0.004, decode.run)
    with Prefill(backend, PREFILL_TOKENS) as prefill:
        time.sleep(0.5)
    undisturbed = p50(prefill.times)
    before = backend.stats()["workers"]
    with Prefill(backend, PREFILL_TOKENS) as prefill:
        beside = latencies(count, 0.004, decode.run)
    after = backend.stats()["workers"]
    tile = tile_s(before, after, PHASE_PREFILL)
    allowed = 1.3 * p50(alone) + tile
    rows.append(Row("decode alone, p50", "us", p50(alone) * 1e6, None, "", None))
    rows.append(Row("a prefill tile, mean", "us", tile * 1e6, None, "", None))
    rows.append(
        Row(
            "decode beside prefill, p50",
            "us",
            p50(beside) * 1e6,
            p50(alone) * 1e6,
            "alone",
            allowed / p50(alone),
        )
    )
    rows.append(
        Row("decode beside prefill, p99", "us", p99(beside) * 1e6, p99(alone) * 1e6, "alone", None)
    )

    def in_order() -> float:
        begin = time.perf_counter()
        prefill.client.wait()
        decode.run()
        return time.perf_counter() - begin

    fifo = []
    for k in range(max(10, count // 20)):
        prefill.client.start()
        time.sleep(undisturbed * ((k * 0.618) % 1))
        fifo.append(in_order())
    rows.append(
        Row(
            "decode beside prefill, p50",
            "us",
            p50(beside) * 1e6,
            p50(sorted(fifo)) * 1e6,
            "in order of arrival",
            None,
        )
    )
    decode_s = sum(busy(after, PHASE_DECODE)) - sum(busy(before, PHASE_DECODE))
    total = sum(prefill.times)
    expected = len(prefill.times) * undisturbed + decode_s / len(after)
    rows.append(
        Row("prefill beside decode", "s", total, expected, "prefill alone + decode's work", 1.1)
    )


def busy(workers: list[dict], phase: int) -> list[float]:
    return [w["busy_ns"][phase] / 1e9 for w in workers]


def tile_s(before: list[dict], after: list[dict], phase: int) -> float:
    tiles = sum(b["tiles"][phase] - a["tiles"][phase] for a, b in zip(before, after, strict=True))
    return (sum(busy(after, phase)) - sum(busy(before, phase))) / max(1, tiles)


def preemption_by_length(count: int, rows: list[Row]) -> None:
    shortest = None
    for tokens in LENGTHS:
        backend = TilesBackend(layers())
        decode = Client(backend, DECODE_TOKENS, PHASE_DECODE, source=1)
        with Prefill(backend, tokens):
            found = latencies(count, 0.006, decode.run)
        workers = backend.stats()["workers"]
        backend.close()
        preemptions = sum(w["preemptions"] for w in workers)
        mean = sum(w["preempt_ns"] for w in workers) / max(1, preemptions) / 1e3
        shortest = shortest or (mean, p50(found))
        rows.append(
            Row(
                f"preemption, {tokens} tokens of prefill",
                "us",
                mean,
                shortest[0],
                f"{LENGTHS[0]} tokens",
                None,
            )
        )
        rows.append(
            Row(
                f"decode p50, {tokens} tokens of prefill",
                "us",
                p50(found) * 1e6,
                shortest[1] * 1e6,
                f"{LENGTHS[0]} tokens",
                1.3,
            )
        )


def coalescing(count: int, rows: list[Row]) -> None:
    """Weights read by two decode servers: ready together, and each in its own time."""
    backend = TilesBackend(layers())
    both = [operation(DECODE_TOKENS, PHASE_DECODE, source) for source in (0, 1)]
    for _ in range(count):
        done = [threading.Event() for _ in both]
        backend.submit([replace(o, complete=d.set) for o, d in zip(both, done, strict=True)])
        for d in done:
            d.wait(60)
    together = sum(w["weight_bytes"][PHASE_DECODE] for w in backend.stats()["workers"])
    backend.close()
    rows.append(
        Row(
            "weights read, decode servers in step",
            "MB per layer",
            together / count / 1e6,
            layers()[0].bytes / 1e6,
            "once",
            1.0,
        )
    )
    read = {}
    for window in (0, WINDOW_US):
        backend = TilesBackend(layers(), TileOptions(window_us=window))
        pair = [Client(backend, DECODE_TOKENS, PHASE_DECODE, source) for source in (0, 1)]

        def server(client: Client) -> None:
            for _ in range(count):
                client.run()
                time.sleep(0.0003)  # attention

        threads = [threading.Thread(target=server, args=(c,)) for c in pair]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        stats = backend.stats()
        backend.close()
        read[window] = sum(w["weight_bytes"][PHASE_DECODE] for w in stats["workers"])
    rows.append(
        Row(
            "weights read, decode servers on their own",
            "MB per layer",
            read[WINDOW_US] / count / 1e6,
            read[0] / count / 1e6,
            "no window",
            None,
        )
    )
    rows.append(
        Row(
            "weights read, decode servers on their own",
            "MB per layer",
            read[WINDOW_US] / count / 1e6,
            layers()[0].bytes / 1e6,
            "once",
            None,
        )
    )
    without, within = (p50(beside_slow(count, window)) for window in (0, WINDOW_US))
    rows.append(
        Row(
            f"decode beside a slow decode server, window {WINDOW_US} us, p50",
            "us",
            within * 1e6,
            without * 1e6,
            "no window",
            1 + WINDOW_US * 1e-6 / without,
        )
    )


def beside_slow(count: int, window_us: int) -> list[float]:
    """Latencies of a fast decode server while another sends an operation every 10 ms."""
    backend = TilesBackend(layers(), TileOptions(window_us=window_us))
    fast = Client(backend, DECODE_TOKENS, PHASE_DECODE, 1)
    slow = Client(backend, DECODE_TOKENS, PHASE_DECODE, 0)
    stop = threading.Event()

    def crawl() -> None:
        while not stop.wait(0.01):
            slow.run()

    thread = threading.Thread(target=crawl)
    thread.start()
    found = latencies(count, 0.0003, fast.run)
    stop.set()
    thread.join()
    backend.close()
    return found


def equation_4() -> None:
    table = Table(
        "x_moe / x_moe*", "q' in SMs", title="Eq. (4): q = 44, Q_max = 100, clusters of 2"
    )
    for quarter in range(17):
        share = sm_budget(q=44, q_max=100, x_star=64, cluster=2, x_moe=16 * quarter)
        table.add_row(f"{quarter / 4:.2f}", str(share))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="fewer operations, rougher figures")
    args = parser.parse_args()
    count = 60 if args.quick else 300
    torch.set_num_threads(1)
    rows: list[Row] = []
    with console.status("decode beside prefill"):
        backend = TilesBackend(layers())
        decode_beside_prefill(backend, count, rows)
        backend.close()
    with console.status("preemption against prefill length"):
        preemption_by_length(count // 2, rows)
    with console.status("coalescing"):
        coalescing(count, rows)
    table = Table("", "unit", "ours", "peer", "", "ratio", "at most", title="Preemption on a CPU")
    for r in rows:
        table.add_row(
            r.name,
            r.unit,
            f"{r.ours:,.1f}",
            "" if r.peer is None else f"{r.peer:,.1f}",
            r.peer_name,
            "" if r.ratio is None else f"{r.ratio:.3f}",
            "" if r.floor is None else f"{r.floor:.2f}",
        )
    console.print(table)
    equation_4()
    write("preemption_cpu", rows, args.json)


if __name__ == "__main__":
    main()
