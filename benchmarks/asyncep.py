"""AsyncEP beside other ways to serve a prefill-only load on the same machine.

    python benchmarks/asyncep.py MODEL [--engines 2] [--cells 128 512 512:shared] [--json FILE]
    python benchmarks/asyncep.py FOLDER --write qwen3-235b-a22b --layers 8

Every mode is started, measured and stopped in turn, or with --side-by-side all are started at once
and measured in turn, cell by cell; all answer the same prompts (one token, logprobs). For each
length and kind of prefix: prompt tokens/s at saturation. For AsyncEP also how long a layer's gather
takes and computing waits for it, by the tokens of a batch, against the threshold T; and a burst
after idle. The JSON is written after every cell. On GPUs pass the lengths
of the load, and --peak-tflops for MFU; --write makes a model of real layers, as many as there is
room for, to serve with --load-format dummy.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from _report import Row, write
from asyncep_load import PREFIXES, Cell, request, send, together
from rich.console import Console
from rich.table import Table

from vllm_expertplex.asyncep.flops import Flops
from vllm_expertplex.planner.model_configs import load_model

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.e2e import server as servers

console = Console(width=150)

SPEEDUP_FLOOR, MFU_FLOOR, WAIT_CEILING = 1.35, 0.36, 0.02  # aims at saturation, on GPUs
WARM_TOKENS = 131_072  # longer prompts run the kernels of shorter ones
Found = dict[str, dict[Cell, float]]  # mode -> prompt tokens/s


class Mode(NamedTuple):
    """A way to serve: vLLM's options for it, or AsyncEP's configuration."""

    name: str
    options: tuple[str, ...]
    config: dict[str, Any] | None = None


def modes(engines: int, step_tokens: int | None) -> list[Mode]:
    """`step_tokens` are those of a step for each engine's GPU; tensor parallel GPUs share one."""
    parallel = str(engines)

    def step(gpus: int) -> tuple[str, ...]:
        return ("--max-num-batched-tokens", str(gpus * step_tokens)) if step_tokens else ()

    tensor = ("--tensor-parallel-size", parallel, *step(engines))
    return [
        Mode("plain, one engine", step(1)),
        Mode("TP+TP", tensor),
        Mode("TP+EP", (*tensor, "--enable-expert-parallel")),
        Mode("DP+EP", ("--data-parallel-size", parallel, "--enable-expert-parallel", *step(1))),
        Mode("AsyncEP, no frontend", step(1), {"gpus": engines, "frontend": False}),
        Mode("AsyncEP", step(1), {"gpus": engines}),
    ]


def begin(
    mode: Mode, args: argparse.Namespace, scratch: Path
) -> AbstractContextManager[servers.Server]:
    options = [*mode.options, *args.option]
    if mode.config is not None:
        file = scratch / f"{mode.name}.json"
        file.write_text(json.dumps(mode.config | json.loads(args.config)))
        options += ["--executor", "asyncep", "--asyncep-config", str(file)]
    log = (args.logs or scratch) / f"{mode.name.replace(' ', '-')}.log"
    return servers.start(args.model, log, options=options)


@contextmanager
def served(
    chosen: Sequence[Mode], args: argparse.Namespace, scratch: Path
) -> Iterator[dict[str, servers.Server]]:
    """The servers of these modes, warm; without those that this vLLM cannot serve, with a word
    why.
    """
    running = {}
    started = time.monotonic()
    with ExitStack() as stack:
        begun = {mode.name: stack.enter_context(begin(mode, args, scratch)) for mode in chosen}
        for name, server in begun.items():
            try:
                with console.status(f"{name}: starting"):
                    server.wait_healthy(max(1.0, started + args.start_deadline - time.monotonic()))
                running[name] = server
                console.log(f"{name}: ready after {time.monotonic() - started:.0f} s")
            except servers.ServerError as error:
                console.print(f"{name}: cannot serve here ({str(error)[-300:]})")
                server.kill()
        failed = asyncio.run(warm({n: server.port for n, server in running.items()}, args))
        yield {name: server for name, server in running.items() if name not in failed}
        with ThreadPoolExecutor() as pool, suppress(servers.ServerError):
            list(pool.map(lambda server: server.stop(10), running.values()))


async def warm(ports: Mapping[str, int], args: argparse.Namespace) -> set[str]:
    """Kernels are compiled for each size when they first see it. Returns modes that cannot serve
    what will be asked, with a word why.
    """
    asked = [cell for cell in args.cells if cell.length <= WARM_TOKENS // args.engines]
    batches = [
        cell.requests(_count(cell, min(args.tokens, WARM_TOKENS), args), 1) for cell in asked
    ]
    small = [_batch(size, args, salt) for salt, size in enumerate(args.batches, 3)]

    async def one(name: str, port: int) -> None:
        for requests in batches + (small if name == "AsyncEP" else []):
            await send(port, requests)

    modes = [asyncio.wait_for(one(name, port), args.start_deadline) for name, port in ports.items()]
    ended = await asyncio.gather(*modes, return_exceptions=True)
    failed = {name: error for name, error in zip(ports, ended, strict=True) if error is not None}
    for name, error in failed.items():
        console.print(f"{name}: cannot serve this ({error!r})")
    return set(failed)


def _count(cell: Cell, tokens: int, args: argparse.Namespace) -> int:
    """Prompts of a round of `tokens`: every engine has one."""
    return max(args.engines, tokens // cell.length)


def _batch(size: int, args: argparse.Namespace, salt: int) -> list[bytes]:
    """A batch of `size` tokens for every engine, of the shortest prompts."""
    cell = Cell(min(cell.length for cell in args.cells))
    return cell.requests(max(1, size // cell.length) * args.engines, salt * 1_000_000)


def engines(server: servers.Server) -> list[dict[str, Any]]:
    return server.http.get("/expertplex/status").json()["servers"]


class Gathering(NamedTuple):
    """Of all engines between two statuses."""

    gather_s: float  # of a layer, on average
    bytes_per_s: float  # meanwhile
    waited_s: float  # by computing for a layer, on average
    waited_in_all_s: float  # by an engine

    @classmethod
    def between(cls, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> "Gathering":
        def grown(field: str) -> int:
            return sum(a[field] - b[field] for a, b in zip(after, before, strict=True))

        gathers, seconds = max(1, grown("gathers")), grown("gather_ns") * 1e-9
        waited = grown("waited_ns") * 1e-9
        rate = grown("gathered_bytes") / max(seconds, 1e-9)
        return cls(seconds / gathers, rate, waited / gathers, waited / len(after))


def throughput(server: servers.Server, cell: Cell, args: argparse.Namespace) -> list[float]:
    """Prompt tokens/s of --rounds rounds, or of as many as there was time for."""
    rates: list[float] = []
    begun = time.monotonic()
    count = _count(cell, args.tokens, args)
    while len(rates) < args.rounds and (not rates or time.monotonic() - begun < args.cell_seconds):
        requests = cell.requests(count, 100_000 * (1 + len(rates)))
        seconds, _ = together(server.port, requests)
        rates.append(count * cell.length / seconds)
    return rates


def hidden(
    server: servers.Server, cell: Cell, args: argparse.Namespace
) -> tuple[list[float], list[Row]]:
    """As `throughput`, and what part of the time an AsyncEP engine waited for gathers."""
    before = engines(server)
    rates = throughput(server, cell, args)
    found = Gathering.between(before, engines(server))
    asked = _count(cell, args.tokens, args) * cell.length
    waited = found.waited_in_all_s / sum(asked / rate for rate in rates)
    return rates, [
        Row(f"{cell}: waiting for gathers", "share", waited, None, "", WAIT_CEILING),
        Row(f"{cell}: gather of a layer", "ms", found.gather_s * 1e3, None, "", None),
        Row(f"{cell}: gathering", "GB/s", found.bytes_per_s / 1e9, None, "", None),
    ]


def hiding(server: servers.Server, args: argparse.Namespace) -> list[Row]:
    """By tokens of an engine's batch: the gather of a layer, and what computing waited for it."""
    threshold = server.http.get("/expertplex/status").json()["threshold"]
    rows = [
        Row("T, tokens of a batch", "tokens", threshold["tokens"], None, "", None),
        Row("F, reached at start-up", "TFLOP/s", threshold["flops_per_s"] / 1e12, None, "", None),
        Row("t_EP, measured at start-up", "ms", threshold["gather_s"] * 1e3, None, "", None),
    ]
    for index, size in enumerate(args.batches):
        before, taken = engines(server), 0.0
        for again in range(args.rounds):
            requests = _batch(size, args, 100 + 10 * index + again)
            taken += together(server.port, requests)[0]
        found = Gathering.between(before, engines(server))
        name = f"batches of {size} tokens"
        rows += [
            Row(f"{name}: gather of a layer", "ms", found.gather_s * 1e3, None, "", None),
            Row(f"{name}: waiting for it", "ms", found.waited_s * 1e3, None, "", None),
            Row(f"{name}: gathering", "GB/s", found.bytes_per_s / 1e9, None, "", None),
            Row(f"{name}: answered after", "ms", taken / args.rounds * 1e3, None, "", None),
        ]
    time.sleep(2)
    cell = Cell(min(cell.length for cell in args.cells))
    burst = [request([cell.prompt(index, 99_000_000)]) for index in range(32)]
    _, each = together(server.port, burst)
    rows.append(Row("burst of 32 after idle: first answer", "ms", min(each) * 1e3, None, "", None))
    rows.append(Row("burst of 32 after idle: last answer", "ms", max(each) * 1e3, None, "", None))
    return rows


def compare(found: Found) -> list[Row]:
    """AsyncEP against the best of vLLM's own modes, cell by cell, the others, and no frontend."""
    rows = []
    for cell, rate in found.get("AsyncEP", {}).items():
        stock = _stock(found, cell)
        best = max(stock, key=lambda name: stock[name], default=None)
        peer = stock[best] if best else None
        floor = SPEEDUP_FLOOR if best else None
        rows.append(Row(str(cell), "tokens/s", rate, peer, best or "no mode of vLLM's", floor))
        for name, peer in stock.items():
            if name != best:
                rows.append(Row(str(cell), "tokens/s", rate, peer, name, None))
        bare = "AsyncEP, no frontend"
        if cell in found.get(bare, {}):
            rows.append(Row(f"{cell}: frontend", "tokens/s", rate, found[bare][cell], bare, None))
    return rows


def _stock(found: Found, cell: Cell) -> dict[str, float]:
    modes = (name for name in found if not name.startswith("AsyncEP") and cell in found[name])
    return {name: found[name][cell] for name in modes}


def mfu(found: Found, args: argparse.Namespace) -> list[Row]:
    """Against --peak-tflops of all engines together, where nothing is reused."""
    if not args.peak_tflops:
        return []
    model = load_model(str(args.model))
    peak = args.peak_tflops * 1e12 * args.engines
    rows = []
    for cell, rate in found.get("AsyncEP", {}).items():
        if cell.prefixes != "none":
            continue
        scale = Flops(model).new(cell.length) * model.moe_layers / cell.length / peak
        best = max(_stock(found, cell).values(), default=None)
        peer = None if best is None else scale * best
        name = f"MFU at {cell.length} tokens"
        rows.append(Row(name, "share", scale * rate, peer, "vLLM's best", MFU_FLOOR))
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--engines", type=int, default=2)
    cells = [Cell(length, prefixes) for length in (128, 512) for prefixes in PREFIXES]
    parser.add_argument(
        "--cells",
        type=Cell.parse,
        nargs="+",
        default=cells,
        metavar="LENGTH[:PREFIXES]",
        help=f"what is asked, in this order; prefixes are {', '.join(PREFIXES)}",
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[128, 256, 512, 1024, 2048])
    parser.add_argument("--tokens", type=int, default=8192, help="prompt tokens of one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cell-seconds", type=float, default=60.0, help="no more rounds after it")
    parser.add_argument("--seconds", type=float, help="begin no cell later than this after start")
    parser.add_argument("--config", default="{}", help="further AsyncEP options, as JSON")
    parser.add_argument("--option", action="append", default=[], help="for vllm serve, all modes")
    parser.add_argument("--step-tokens", type=int, help="of a step, for each GPU")
    parser.add_argument("--only", nargs="+", metavar="MODE", help="leave other modes out")
    parser.add_argument("--side-by-side", action="store_true", help="start all modes at once")
    parser.add_argument("--start-deadline", type=float, default=servers.START_DEADLINE_S)
    parser.add_argument("--peak-tflops", type=float, help="of one engine's device")
    parser.add_argument("--write", metavar="NAME", help="write a model to the folder, and end")
    parser.add_argument("--layers", type=int, help="of the model to write")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the servers' logs there")
    parser.add_argument("--json", metavar="FILE")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.write:
        from asyncep_models import write_model

        write_model(args.model, args.write, args.layers)
        return
    if args.peak_tflops:
        import torch  # noqa: F401  the report asks it for the GPUs' name
    servers.interrupt_on_sigterm()
    chosen = [m for m in modes(args.engines, args.step_tokens) if m.name in (args.only or [m.name])]
    bench = Bench(args)
    with tempfile.TemporaryDirectory() as scratch, suppress(KeyboardInterrupt):
        for group in [chosen] if args.side_by_side else [[mode] for mode in chosen]:
            with served(group, args, Path(scratch)) as running:
                bench.measure(running)
    console.print(table(bench.rows(), args))
    bench.write()


class Bench:
    """What has been measured so far, kept on disk."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._begun = time.monotonic()
        self._found: Found = {}
        self._gathers: list[Row] = []

    def measure(self, running: Mapping[str, servers.Server]) -> None:
        """Cell by cell, so that what there is no time for is missing for all modes."""
        for index, cell in enumerate(self._args.cells):
            if time.monotonic() - self._begun > (self._args.seconds or float("inf")):
                console.log(f"{cell}: no time left")
                continue
            for name, server in running.items():
                try:
                    if name == "AsyncEP":
                        rates, rows = hidden(server, cell, self._args)
                        self._gathers += rows
                    else:
                        rates = throughput(server, cell, self._args)
                except httpx.HTTPError as error:
                    console.log(f"{cell}: {name}: {error!r}")
                    continue
                self._found.setdefault(name, {})[cell] = statistics.median(rates)
                each = ", ".join(f"{rate:.0f}" for rate in rates)
                console.log(f"{cell}: {name}: {each} tokens/s")
            if index == 0 and "AsyncEP" in running:
                try:
                    self._gathers += hiding(running["AsyncEP"], self._args)
                except httpx.HTTPError as error:
                    console.log(f"AsyncEP, batch by batch: {error!r}")
            self.write()

    def rows(self) -> list[Row]:
        return compare(self._found) + mfu(self._found, self._args) + self._gathers

    def write(self) -> None:
        write("asyncep", self.rows(), self._args.json)


def table(rows: list[Row], args: argparse.Namespace) -> Table:
    result = Table(title=f"{args.model.name}, AsyncEP on {args.engines} engines")
    for column in ("", "unit", "AsyncEP", "peer", "", "ratio", "aim"):
        result.add_column(column, justify="left" if not column else "right")
    for row in rows:
        result.add_row(
            row.name,
            row.unit,
            f"{row.ours:.4g}",
            "" if row.peer is None else f"{row.peer:.4g}",
            row.peer_name,
            "" if row.ratio is None else f"{row.ratio:.2f}",
            "" if row.floor is None else f"{row.floor:g}",
        )
    return result


if __name__ == "__main__":
    main()
