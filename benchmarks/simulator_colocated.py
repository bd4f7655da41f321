"""The simulator against vLLM itself with chunked prefill: TTFT and TPOT, P50 and P90, by rate.

    vllm serve MODEL ... --max-num-batched-tokens 8192
    python benchmarks/simulator_colocated.py --url http://127.0.0.1:8000 --layers 16 \\
        --rates 5,10,20 --runs runs.json          (on the machine with the server: measure)
    python benchmarks/simulator_colocated.py --runs runs.json --profile profile.json   (judge)
    python benchmarks/simulator_colocated.py --bench a.json,b.json --layers 16 --tp 2 \\
        --runs runs.json        (take what `vllm bench serve --save-detailed` measured, and judge)

Measuring sends Poisson arrivals, open loop, to a server of MiniMax-M2.7's dimensions with so many
layers (`model_speed.py --write`), and keeps every request: when it came, its lengths, its first and
last token. Judging simulates the same arrivals and lengths on the profile, or on the latency model
without one, and compares. Nothing is fitted to the runs. The assumed 4 ms of the host in an
iteration with prompts may be longer than vLLM's, which schedules ahead; so both are shown, with and
without. Random weights route evenly: 64 tokens reach 224 of 256 experts.

Requests that had not ended when a run was stopped are simulated, with as many output tokens as the
others had on average, but not judged.
"""

import argparse
import asyncio
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
from _report import Row, write
from model_speed import M27
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from simulator_validation import TIMEOUT, Client, send

from vllm_expertplex.planner.assumptions import Assumptions, override
from vllm_expertplex.planner.setup import Setting, setting
from vllm_expertplex.planner.workload import load_workload
from vllm_expertplex.simulator.requests import Requests, poisson
from vllm_expertplex.simulator.runs import Case, replay

WITHIN = 0.20
SEED = 200  # of the first rate; the next ones follow
PERCENTILES = (50, 90)
FIELDS = ("arrival", "inputs", "outputs", "first", "finish")
console = Console()


def percentiles(requests: Requests, judged: NDArray[np.bool_] | None = None) -> dict[str, float]:
    """Seconds; of the requests that are `judged`."""
    of = slice(None) if judged is None else judged
    return {
        f"{what.upper()} P{percent}": float(np.percentile(getattr(requests, what)[of], percent))
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


def bench_run(path: Path) -> dict[str, Any]:
    """A run as `measure` keeps it, from a file of `vllm bench serve --save-detailed`."""
    found = json.loads(path.read_text())
    ended = np.asarray([not error for error in found["errors"]])
    start = np.asarray(found["start_times"]) - found["start_times"][0]
    first = start + found["ttfts"]
    finish = first + [sum(gaps) for gaps in found["itls"]]
    outputs = np.asarray(found["output_lens"])
    outputs[~ended] = round(float(outputs[ended].mean()))
    return {
        "rate": found["request_rate"],
        "lengths": f"{np.mean(found['input_lens']):.0f}/{outputs.mean():.0f}",
        "arrival": start.round(6).tolist(),
        "inputs": found["input_lens"],
        "outputs": outputs.tolist(),
        "first": np.where(ended, first.round(6), None).tolist(),
        "finish": np.where(ended, finish.round(6), None).tolist(),
    }


def arrivals(run: dict[str, Any]) -> Requests:
    return Requests(*(np.asarray(run[field]) for field in FIELDS[:3]))


def measured(run: dict[str, Any]) -> Requests:
    """With the times that were measured; NaN where a request had not ended."""
    found = arrivals(run)
    found.first, found.finish = (
        [math.nan if time is None else time for time in run[field]] for field in FIELDS[3:]
    )
    return found


def load(run: dict[str, Any]) -> str:
    lengths = f" of {run['lengths']}" if "lengths" in run else ""
    return f"{run['rate']:.3g} req/s{lengths}"


def measured_rows(runs: list[dict[str, Any]]) -> list[Row]:
    rows = []
    for run in runs:
        found = measured(run)
        ended = np.isfinite(found.finish)
        for name, value in percentiles(found, ended).items():
            rows.append(Row(f"{name} at {load(run)}", "s", value, None, "", None))
    return rows


def settings(layers: int, args: argparse.Namespace) -> dict[str, Setting]:
    """What is judged, by name."""
    with tempfile.TemporaryDirectory() as folder:
        config = json.dumps(M27 | {"num_hidden_layers": layers})
        (Path(folder) / "config.json").write_text(config)
        assumed = override(
            Assumptions(prefill_tokens=args.chunk, decode_slots=args.slots, routing_sigma=0.0),
            args.assume,
        )
        no_host = msgspec.structs.replace(assumed, host_prefill=0.0, host_decode=0.0)

        def build(assumptions: Assumptions, profile: str | None) -> Setting:
            return setting(folder, "h200", args.workload, 60, 10, assumptions, profile=profile)

        found = {
            "model": build(assumed, None),
            "model, no host": build(no_host, None),
        }
        if args.profile:
            found["profile"] = build(assumed, args.profile)
            found["profile, no host"] = build(no_host, args.profile)
        return found


def judge(kept: dict[str, Any], args: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    layers, tp = kept["layers"], kept.get("tp", 1)
    named = settings(layers, args)
    table = Table(title=f"vLLM, chunked prefill, {layers} layers: simulated over measured")
    table.add_column("load, what, measured (ms)")
    for name in named:
        table.add_column(name, justify="right")
    for run in kept["runs"]:
        seen = measured(run)
        ended = np.isfinite(seen.finish)
        found = {}
        for name, chosen in named.items():
            options: dict[str, object] = {"chunk": args.chunk, "tp": tp}
            case = Case(setting=chosen, gpus=tp, mode="chunked", options=options)
            drawn = arrivals(run)
            replay(case, drawn, run["rate"])
            found[name] = percentiles(drawn, ended)
        for what, seconds in percentiles(seen, ended).items():
            cells = []
            for name, simulated in found.items():
                label = f"{name}: {what} at {load(run)}"
                row = Row(label, "s", simulated[what], seconds, "measured", None)
                rows.append(row)
                ratio = simulated[what] / seconds
                mark = "" if abs(ratio - 1) <= WITHIN else " !"
                cells.append(f"{simulated[what] * 1e3:.1f} ({ratio:.2f}){mark}")
            table.add_row(f"{load(run)}, {what}, {seconds * 1e3:.1f}", *cells)
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
    parser.add_argument("--bench", help="files of `vllm bench serve --save-detailed`, with commas")
    parser.add_argument("--device", default="", help="that --bench's files were measured on")
    parser.add_argument("--tp", type=int, default=1, help="GPUs: tensor and expert parallel")
    parser.add_argument("--served-name", default="model", help="the model's name at the server")
    parser.add_argument("--layers", type=int, help="of the served model")
    parser.add_argument("--workload", default="sharegpt", help="lengths; see `plan --help`")
    parser.add_argument("--rates", type=lambda t: [float(r) for r in t.split(",")], default=[1.0])
    parser.add_argument("--seconds", type=float, default=20, help="of arrivals at each rate")
    parser.add_argument("--warm-s", type=float, default=15, help="of arrivals before, unmeasured")
    parser.add_argument("--longest", type=int, default=8192, help="cap on tokens of a request")
    parser.add_argument("--chunk", type=int, default=8192, help="server's --max-num-batched-tokens")
    parser.add_argument("--slots", type=int, default=256, help="server's --max-num-seqs")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", dest="assume",
        help="change an assumption, such as host_prefill=0.01",
    )  # fmt: skip
    parser.add_argument("--profile", metavar="FILE", help="of `vllm-expertplex profile`")
    parser.add_argument("--json", metavar="FILE", help="write the judgement's rows to this file")
    args = parser.parse_args()
    if (args.url or args.bench) and not args.layers:
        parser.error("--url and --bench need --layers, the number the server has")
    about = {"layers": args.layers, "tp": args.tp, "workload": args.workload}
    if args.url:
        import torch  # noqa: F401  the report asks it for the GPU's name

        keep(args.runs, asyncio.run(measure(args)), about)
    elif args.bench:
        runs = [bench_run(Path(path)) for path in args.bench.split(",")]
        keep(args.runs, runs, about | {"device": args.device, "workload": "as sent"})
    write("simulator_colocated", judge(json.loads(args.runs.read_text()), args), args.json)


def keep(path: Path, runs: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """Write the percentiles as rows and every request beside them."""
    write("plain_colocated", measured_rows(runs), str(path))
    path.write_text(json.dumps(json.loads(path.read_text()) | about | {"runs": runs}) + "\n")


if __name__ == "__main__":
    main()
