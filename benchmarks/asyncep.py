"""AsyncEP beside other ways to serve a prefill-only load on the same machine.

    python benchmarks/asyncep.py MODEL [--engines 2] [--lengths 128 512] [--json FILE]
    python benchmarks/asyncep.py FOLDER --write qwen3-235b-a22b --layers 12

Every mode is started, measured and stopped in turn, or with --side-by-side all are started at once
and measured in turn; all answer the same requests (one token, logprobs). For each prompt length and
kind of prefix: prompt tokens/s at saturation. For AsyncEP also how long a layer's gather takes,
what part of the time computing waited for it, by the tokens of a batch, against the threshold T;
and a burst after idle. On GPUs pass the lengths of the load, and --peak-tflops for MFU; --write
makes a model of real layers, as many as there is room for, to serve with --load-format dummy.
"""

import argparse
import asyncio
import json
import random
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
from rich.console import Console
from rich.table import Table

from vllm_expertplex.asyncep.flops import Flops
from vllm_expertplex.planner.model_configs import load_model

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.e2e import server as servers

console = Console()

PREFIXES = ("none", "shared", "skewed")
SHARE = 0.75  # of a prompt, where prefixes are shared
SPEEDUP_FLOOR, MFU_FLOOR, WAIT_CEILING = 1.35, 0.36, 0.02  # aims at saturation, on GPUs


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


def prompt(length: int, prefixes: str, index: int, salt: int) -> list[int]:
    """`length` tokens. shared: eight prefixes in turn; skewed: most prompts have the same one."""
    groups = {"none": index, "shared": index % 8, "skewed": 0 if index % 8 else index}
    head = int(length * SHARE) if prefixes != "none" else 0
    return [*_drawn(head, groups[prefixes], salt), *_drawn(length - head, index, salt + 1)]


def _drawn(length: int, *seed: int) -> list[int]:
    """Tokens that no other seed gives: nothing may be found in a prefix cache by accident."""
    return random.Random(str(seed)).choices(range(10, 3010), k=length)


async def answer(http: httpx.AsyncClient, tokens: list[int]) -> float:
    """Seconds of one request."""
    body = {"model": servers.MODEL_NAME, "prompt": tokens, "max_tokens": 1, "logprobs": 2}
    begin = time.perf_counter()
    reply = await http.post("/v1/completions", json=body | {"temperature": 0})
    reply.raise_for_status()
    return time.perf_counter() - begin


async def together(port: int, prompts: list[list[int]]) -> tuple[float, list[float]]:
    """All at once: seconds until the last answer, and of each."""
    limits = httpx.Limits(max_connections=None)
    base = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=base, timeout=900, limits=limits) as http:
        begin = time.perf_counter()
        each = await asyncio.gather(*(answer(http, tokens) for tokens in prompts))
        return time.perf_counter() - begin, list(each)


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
    with ExitStack() as stack:
        begun = {mode.name: stack.enter_context(begin(mode, args, scratch)) for mode in chosen}
        for name, server in begun.items():
            try:
                with console.status(f"{name}: starting"):
                    server.wait_healthy(args.start_deadline)
                running[name] = server
                console.log(f"{name}: ready after {server.start_s:.0f} s")
            except servers.ServerError as error:
                console.print(f"{name}: cannot serve here ({str(error)[-300:]})")
        failed = asyncio.run(warm({n: server.port for n, server in running.items()}, args))
        yield {name: server for name, server in running.items() if name not in failed}
        with ThreadPoolExecutor() as pool, suppress(servers.ServerError):
            list(pool.map(lambda server: server.stop(), running.values()))


async def warm(ports: Mapping[str, int], args: argparse.Namespace) -> set[str]:
    """Kernels are compiled for each size when they first see it. Returns modes that cannot serve
    what will be asked, with a word why.
    """

    async def one(port: int) -> None:
        for length in args.lengths:
            count = max(8, args.tokens // length)
            await together(port, [prompt(length, "none", i, length * 1_000) for i in range(count)])

    ended = await asyncio.gather(*(one(port) for port in ports.values()), return_exceptions=True)
    failed = {name: error for name, error in zip(ports, ended, strict=True) if error is not None}
    for name, error in failed.items():
        console.print(f"{name}: cannot serve this ({error!r})")
    return set(failed)


def engines(server: servers.Server) -> list[dict[str, Any]]:
    return server.http.get("/expertplex/status").json()["servers"]


def gathering(
    before: list[dict[str, Any]], after: list[dict[str, Any]]
) -> tuple[float, float, float]:
    """Mean seconds of a gather, bytes per second meanwhile, and seconds an engine waited for
    gathers, between two statuses.
    """

    def grown(field: str) -> int:
        return sum(a[field] - b[field] for a, b in zip(after, before, strict=True))

    seconds = grown("gather_ns") * 1e-9
    each, rate = seconds / max(1, grown("gathers")), grown("gathered_bytes") / max(seconds, 1e-9)
    return each, rate, grown("waited_ns") * 1e-9 / len(after)


def throughput(
    name: str, server: servers.Server, args: argparse.Namespace
) -> dict[tuple[int, str], float]:
    """Prompt tokens/s by (length, prefixes)."""
    found = {}
    salt = 1
    for length in args.lengths:
        count = max(8, args.tokens // length)
        for prefixes in args.prefixes:
            rates = []
            for _ in range(args.rounds):
                salt += 100_000
                prompts = [prompt(length, prefixes, i, salt) for i in range(count)]
                seconds, _ = asyncio.run(together(server.port, prompts))
                rates.append(count * length / seconds)
            found[length, prefixes] = statistics.median(rates)
            console.log(f"{name}: {length} tokens, {prefixes}: {max(rates):.0f} tokens/s")
    return found


def hiding(server: servers.Server, args: argparse.Namespace) -> list[Row]:
    """By tokens of a batch: what part of the time computing waited, and the gather itself."""
    threshold = server.http.get("/expertplex/status").json()["threshold"]["tokens"]
    rows = [Row("T", "tokens", threshold, None, "", None)]
    length, salt = min(args.lengths), 7_000_000
    for size in args.batches:
        before, salt = engines(server), salt + 100_000
        prompts = [prompt(length, "none", i, salt) for i in range(max(1, size // length))]
        seconds, _ = asyncio.run(together(server.port, prompts))
        gather, rate, waited = gathering(before, engines(server))
        name = f"batch of {size} tokens"
        floor = WAIT_CEILING if size > threshold else None
        rows.append(Row(f"{name}: waiting for gathers", "share", waited / seconds, None, "", floor))
        rows.append(Row(f"{name}: gather of a layer", "ms", gather * 1e3, None, "", None))
        rows.append(Row(f"{name}: gathering", "GB/s", rate / 1e9, None, "", None))
        rate = len(prompts) * length / seconds
        rows.append(Row(f"{name}: throughput", "tokens/s", rate, None, "", None))
    time.sleep(2)
    prompts = [prompt(length, "none", i, salt + 50_000) for i in range(32)]
    _, each = asyncio.run(together(server.port, prompts))
    rows.append(Row("burst of 32 after idle: first answer", "ms", min(each) * 1e3, None, "", None))
    rows.append(Row("burst of 32 after idle: last answer", "ms", max(each) * 1e3, None, "", None))
    return rows


def compare(found: dict[str, dict[tuple[int, str], float]]) -> list[Row]:
    """AsyncEP against the best of vLLM's own modes, cell by cell, the others, and no frontend."""
    ours, rows = found["AsyncEP"], []
    stock = {name: cells for name, cells in found.items() if not name.startswith("AsyncEP")}
    for (length, prefixes), rate in ours.items():
        cell = f"{length} tokens, prefixes {prefixes}"
        best = max(stock, key=lambda name: stock[name][length, prefixes], default=None)
        peer = stock[best][length, prefixes] if best else None
        floor = SPEEDUP_FLOOR if best else None
        rows.append(Row(cell, "tokens/s", rate, peer, best or "no mode of vLLM's", floor))
        for name in stock:
            if name != best:
                peer = stock[name][length, prefixes]
                rows.append(Row(cell, "tokens/s", rate, peer, name, None))
        if bare := found.get("AsyncEP, no frontend"):
            peer, name = bare[length, prefixes], "AsyncEP, no frontend"
            rows.append(Row(f"{cell}: frontend", "tokens/s", rate, peer, name, None))
    return rows


def mfu(found: dict[tuple[int, str], float], args: argparse.Namespace) -> list[Row]:
    """Against --peak-tflops of all engines together, where nothing is reused."""
    if not args.peak_tflops:
        return []
    model = load_model(str(args.model))
    peak = args.peak_tflops * 1e12 * args.engines
    return [
        Row(
            f"MFU at {length} tokens",
            "share",
            Flops(model).new(length) * model.moe_layers / length * rate / peak,
            None,
            "",
            MFU_FLOOR,
        )
        for (length, prefixes), rate in found.items()
        if prefixes == "none"
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--prefixes", nargs="+", choices=PREFIXES, default=PREFIXES)
    parser.add_argument("--batches", type=int, nargs="+", default=[128, 256, 512, 1024, 2048])
    parser.add_argument("--tokens", type=int, default=8192, help="prompt tokens of one round")
    parser.add_argument("--rounds", type=int, default=3)
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
    found: dict[str, dict[tuple[int, str], float]] = {}
    rows: list[Row] = []
    chosen = [m for m in modes(args.engines, args.step_tokens) if m.name in (args.only or [m.name])]
    with tempfile.TemporaryDirectory() as scratch:
        for group in [chosen] if args.side_by_side else [[mode] for mode in chosen]:
            with served(group, args, Path(scratch)) as running:
                for name, server in running.items():
                    found[name] = throughput(name, server, args)
                if "AsyncEP" in running:
                    rows = hiding(running["AsyncEP"], args)
    if "AsyncEP" in found:
        rows = compare(found) + mfu(found["AsyncEP"], args) + rows
    console.print(table(rows, args))
    write("asyncep", rows, args.json)


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
