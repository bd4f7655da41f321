"""What splitting a model over servers costs on one machine, beside plain vLLM on the same cores.

    python benchmarks/serving_overhead.py MODEL [--layout 1P1D1E] [--json FILE]

Starts plain vLLM, measures, stops it; then the same with ExpertPlex. One request at a time gives
TTFT and TPOT (medians), several at once throughput. The split of one remote MoE layer comes from
`/metrics`. Both run eager, as ExpertPlex does by default on CPU.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
from _report import Row, write
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.e2e import server as servers

console = Console()

PROMPT_TOKENS = 128
OUTPUT_TOKENS = 64
ALONE = 7  # requests one after another
TOGETHER = 8  # requests at once, for throughput
IDLE_S = 10.0

TTFT_FLOOR, TPOT_FLOOR, START_FLOOR = 1.5, 1.3, 1.5  # at most, as ratios to plain vLLM
LAYER_FLOOR_US = 150.0  # added TPOT per MoE layer
IDLE_FLOOR = 0.05  # cores, all processes together


class Measured(NamedTuple):
    start_s: float
    ttft_ms: float
    tpot_ms: float
    tokens_per_s: float
    idle_cores: float
    layer_us: dict[str, float]


async def one(http: httpx.AsyncClient, seed: int) -> tuple[float, float]:
    """TTFT and TPOT in ms of one streamed request with a prompt of its own."""
    prompt = [5 + (seed * 7919 + i * 31) % 3000 for i in range(PROMPT_TOKENS)]
    body = {
        "model": servers.MODEL_NAME,
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    begin, times = time.perf_counter(), []
    async with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    return (times[0] - begin) * 1e3, (times[-1] - times[0]) / (len(times) - 1) * 1e3


async def load(port: int) -> tuple[float, float, float]:
    """Median TTFT and TPOT in ms of single requests, and output tokens/s of several at once."""
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=300) as http:
        for seed in range(2):
            await one(http, seed)
        alone = [await one(http, 100 + seed) for seed in range(ALONE)]
        begin = time.perf_counter()
        await asyncio.gather(*(one(http, 200 + seed) for seed in range(TOGETHER)))
        throughput = TOGETHER * OUTPUT_TOKENS / (time.perf_counter() - begin)
    return (
        statistics.median(ttft for ttft, _ in alone),
        statistics.median(tpot for _, tpot in alone),
        throughput,
    )


def counters(server: servers.Server) -> dict[str, float]:
    """ExpertPlex's counters of the decode server and of decode operations, by short name."""
    values: dict[str, float] = {}
    for line in server.http.get("/metrics").text.splitlines():
        name, _, value = line.rpartition(" ")
        if line.startswith("expertplex:") and "decode" in name:
            short = name.split("{")[0].removeprefix("expertplex:").removesuffix("_total")
            values[short] = values.get(short, 0.0) + float(value)
    return values


def split(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """us per remote MoE layer on the decode server: dispatch, wait, of that compute, combine."""
    layers = after["remote_layers"] - before["remote_layers"]
    operations = max(1.0, after["operations"] - before["operations"])
    us = {
        part: (after[f"{part}_seconds"] - before[f"{part}_seconds"]) / layers * 1e6
        for part in ("dispatch", "wait", "combine")
    }
    compute = (after["operation_seconds"] - before["operation_seconds"]) / operations * 1e6
    return us | {"of which MoE server": compute}


def idle_cores(server: servers.Server) -> float:
    """Cores that all processes of an idle server use together."""

    def used() -> float:
        return sum(sum(p.cpu_times()[:2]) for p in server.processes())

    time.sleep(2)
    before = used()
    time.sleep(IDLE_S)
    return (used() - before) / IDLE_S


def measure(model: Path, layout: str | None, scratch: Path) -> Measured:
    name = layout or "plain vLLM"
    with (
        console.status(f"{name}: starting"),
        servers.serve(model, scratch / f"{layout}.log", layout=layout) as server,
    ):
        console.log(f"{name}: healthy after {server.start_s:.1f} s; measuring")
        before = counters(server)
        ttft, tpot, throughput = asyncio.run(load(server.port))
        layers = split(before, counters(server)) if layout else {}
        idle = idle_cores(server)
    return Measured(server.start_s, ttft, tpot, throughput, idle, layers)


def moe_layers(model: Path) -> int:
    """MoE layers of a checkpoint: all layers but the dense ones at its front."""
    config = json.loads((model / "config.json").read_text())
    return config["num_hidden_layers"] - config.get("first_k_dense_replace", 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--layout", default="1P1D1E")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        plain = measure(args.model, None, Path(scratch))
        ours = measure(args.model, args.layout, Path(scratch))
    layers = moe_layers(args.model)
    added = (ours.tpot_ms - plain.tpot_ms) / layers * 1e3
    peer = "plain vLLM"
    rows = [
        Row("start-up", "s", ours.start_s, plain.start_s, peer, START_FLOOR),
        Row("TTFT", "ms", ours.ttft_ms, plain.ttft_ms, peer, TTFT_FLOOR),
        Row("TPOT", "ms", ours.tpot_ms, plain.tpot_ms, peer, TPOT_FLOOR),
        Row("output, 8 at once", "tokens/s", ours.tokens_per_s, plain.tokens_per_s, peer, None),
        Row("added TPOT per MoE layer", "us", added, None, peer, LAYER_FLOOR_US),
        Row("idle processes", "cores", ours.idle_cores, plain.idle_cores, peer, IDLE_FLOOR),
        *(Row(f"remote layer: {n}", "us", us, None, peer, None) for n, us in ours.layer_us.items()),
    ]
    console.print(table(rows, args.model.name, args.layout))
    write("serving_overhead", rows, args.json)


def table(rows: list[Row], model: str, layout: str) -> Table:
    cores = len(psutil.Process().cpu_affinity() or [])
    result = Table(title=f"{model}, {layout} beside plain vLLM, {cores} cores")
    for column in ("", "unit", "ExpertPlex", "plain vLLM", "ratio", "aim (at most)"):
        result.add_column(column, justify="left" if not column else "right")
    for row in rows:
        result.add_row(
            row.name,
            row.unit,
            f"{row.ours:.3g}",
            "" if row.peer is None else f"{row.peer:.3g}",
            "" if row.ratio is None else f"{row.ratio:.2f}",
            "" if row.floor is None else f"{row.floor:g}",
        )
    return result


if __name__ == "__main__":
    main()
