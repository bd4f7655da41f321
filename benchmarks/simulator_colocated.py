"""The simulator against vLLM itself with chunked prefill: TTFT and TPOT, P50 and P90, by rate.

    vllm serve MODEL ... --max-num-batched-tokens 8192
    python benchmarks/simulator_colocated.py --url http://127.0.0.1:8000 --layers 16 \\
        --rates 5,10,20 --runs runs.json          (on the machine with the server: measure)
    python benchmarks/simulator_colocated.py --runs runs.json --profile profile.json   (judge)

Measuring sends Poisson arrivals, open loop, to a server of MiniMax-M2.7's dimensions with so many
layers (`model_speed.py --write`), and keeps every request: when it came, its lengths, its first and
last token. Judging simulates the same arrivals and lengths on the profile, or on the latency model
without one, and compares. Nothing is fitted to the runs. The assumed times of the host (4 ms an
iteration) are known to be longer than vLLM's, which schedules ahead; so both are shown, with and
without.
"""

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from _report import Row, write
from model_speed import M27
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from simulator_validation import TIMEOUT, Client, send

from vllm_expertplex.planner.assumptions import Assumptions
from vllm_expertplex.planner.setup import Setting, setting
from vllm_expertplex.planner.workload import load_workload
from vllm_expertplex.simulator.requests import Requests, poisson
from vllm_expertplex.simulator.runs import Case, replay

WITHIN = 0.20
SEED = 200  # of the first rate; the next ones follow
PERCENTILES = (50, 90)
FIELDS = ("arrival", "inputs", "outputs", "first", "finish")
console = Console()


def percentiles(requests: Requests) -> dict[str, float]:
    """Seconds."""
    return {
        f"{what.upper()} P{percent}": float(np.percentile(getattr(requests, what), percent))
        for what in ("ttft", "tpot")
        for percent in PERCENTILES
    }


async def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One entry per rate: the rate, the seed, and all requests with their times in seconds."""
    workload = load_workload(args.workload)
    runs = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=TIMEOUT) as session:
        client = Client(session, args.url, args.served_name, M27["vocab_size"], temperature=1)
        await client.ready()
        with Progress(console=console, transient=True) as bar:
            # Shapes that nobody has asked for yet are compiled now.
            count = int(args.warm_s * max(args.rates))
            if count:
                await send(client, poisson(workload, max(args.rates), count, 1, args.longest), bar)
            for index, rate in enumerate(args.rates):
                count = int(args.seconds * rate)
                drawn = poisson(workload, rate, count, SEED + index, args.longest)
                found = await send(client, drawn, bar)
                runs.append(
                    {
                        "rate": rate,
                        "seed": SEED + index,
                        **{field: getattr(found, field) for field in FIELDS},
                    }
                )
                console.print(rate, percentiles(found))
    return runs


def requests(run: dict[str, Any]) -> Requests:
    found = Requests(*(np.asarray(run[field]) for field in FIELDS[:3]))
    found.first, found.finish = run["first"], run["finish"]
    return found


def measured_rows(runs: list[dict[str, Any]]) -> list[Row]:
    return [
        Row(f"{name} at {run['rate']:g} req/s", "s", value, None, "", None)
        for run in runs
        for name, value in percentiles(requests(run)).items()
    ]


def settings(layers: int, args: argparse.Namespace) -> dict[str, Setting]:
    """What is judged, by name."""
    with tempfile.TemporaryDirectory() as folder:
        config = json.dumps(M27 | {"num_hidden_layers": layers})
        (Path(folder) / "config.json").write_text(config)
        assumed = Assumptions(prefill_tokens=args.chunk, decode_slots=args.slots)
        no_host = Assumptions(
            prefill_tokens=args.chunk, decode_slots=args.slots, host_prefill=0, host_decode=0
        )

        def build(assumptions: Assumptions, profile: str | None) -> Setting:
            load = (args.workload, 60, 10, assumptions)
            return setting(folder, "h200", *load, profile=profile)

        found = {
            "model": build(assumed, None),
            "model, no host": build(no_host, None),
        }
        if args.profile:
            found["profile"] = build(assumed, args.profile)
            found["profile, no host"] = build(no_host, args.profile)
        return found


def judge(layers: int, runs: list[dict[str, Any]], args: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    named = settings(layers, args)
    table = Table(title=f"vLLM, chunked prefill, {layers} layers: simulated over measured")
    table.add_column("req/s, what, measured (ms)")
    for name in named:
        table.add_column(name, justify="right")
    for run in runs:
        real = percentiles(requests(run))
        found = {}
        for name, chosen in named.items():
            case = Case(setting=chosen, gpus=1, mode="chunked", options={"chunk": args.chunk})
            drawn = Requests(*(np.asarray(run[field]) for field in FIELDS[:3]))
            replay(case, drawn, run["rate"])
            found[name] = percentiles(drawn)
        for what, seconds in real.items():
            cells = []
            for name, simulated in found.items():
                label = f"{name}: {what} at {run['rate']:g} req/s"
                row = Row(label, "s", simulated[what], seconds, "measured", None)
                rows.append(row)
                ratio = simulated[what] / seconds
                mark = "" if abs(ratio - 1) <= WITHIN else " !"
                cells.append(f"{simulated[what] * 1e3:.0f} ({ratio:.2f}){mark}")
            table.add_row(f"{run['rate']:g}, {what}, {seconds * 1e3:.0f}", *cells)
    console.print(table)
    for name in named:
        mine = [r for r in rows if r.name.startswith(f"{name}:") and r.ratio is not None]
        within = sum(abs(r.ratio - 1) <= WITHIN for r in mine if r.ratio is not None)
        console.print(f"{name}: {within} of {len(mine)} figures within {WITHIN:.0%}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, required=True, help="where the requests are kept")
    parser.add_argument("--url", help="of a server to measure; without, judge what was measured")
    parser.add_argument("--served-name", default="model", help="the model's name at the server")
    parser.add_argument("--layers", type=int, help="of the served model")
    parser.add_argument("--workload", default="sharegpt", help="lengths; see `plan --help`")
    parser.add_argument("--rates", type=lambda t: [float(r) for r in t.split(",")], default=[1.0])
    parser.add_argument("--seconds", type=float, default=20, help="of arrivals at each rate")
    parser.add_argument("--warm-s", type=float, default=15, help="of arrivals before, unmeasured")
    parser.add_argument("--longest", type=int, default=8192, help="cap on tokens of a request")
    parser.add_argument("--chunk", type=int, default=8192, help="server's --max-num-batched-tokens")
    parser.add_argument("--slots", type=int, default=256, help="server's --max-num-seqs")
    parser.add_argument("--profile", metavar="FILE", help="of `vllm-expertplex profile`")
    parser.add_argument("--json", metavar="FILE", help="write the judgement's rows to this file")
    args = parser.parse_args()
    if args.url:
        import torch  # noqa: F401  the report asks it for the GPU's name

        if not args.layers:
            parser.error("--url needs --layers, the number the server has")
        runs = asyncio.run(measure(args))
        write("plain_colocated", measured_rows(runs), str(args.runs))
        kept = json.loads(args.runs.read_text())
        about = {"layers": args.layers, "workload": args.workload, "runs": runs}
        args.runs.write_text(json.dumps(kept | about) + "\n")
    kept = json.loads(args.runs.read_text())
    write("simulator_colocated", judge(kept["layers"], kept["runs"], args), args.json)


if __name__ == "__main__":
    main()
