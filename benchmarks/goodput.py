"""P90 goodput of ExpertPlex and of vLLM's own ways to serve, on the same GPUs, model and requests.

    python benchmarks/goodput.py MODEL --workload 1024/128 --ttft 1 --tpot 0.05 [--out DIR]
    python benchmarks/goodput.py MODEL --workload trace.csv --systems expertplex,chunked

Goodput is the highest Poisson rate at which at least 90 % of all requests, failures included, meet
both targets; found by bisection with vLLM's benchmark client. For every system it prints and saves
the KV budget, and the attainment of TTFT, TPOT and both at every rate that was tried. Without GPUs
it runs on CPU, which serves tiny models only. Options after `--` go to every `vllm serve`, after a
second `--` to vLLM's own systems only. vLLM's client needs `pip install vllm[bench]`.

Starting a system takes longer than measuring it, so `--speed FILE` also measures each one as
`model_speed.py` does, and where a decode step's time goes (`step_profile.py`).
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import model_speed
import step_profile
import torch
from _report import Row, write
from apk.common import report
from rich.console import Console
from rich.table import Table
from slo import client, search, systems, workload
from slo.systems import interrupt_on_sigterm
from transformers import AutoTokenizer

from vllm_expertplex.planner.workload import Targets

console = Console()

# Of every system, before the caller's own. The defaults of the servers' tests suit tiny models.
GPU_OPTIONS = (
    *("--no-enforce-eager", "--max-num-batched-tokens", "8192", "--max-num-seqs", "256"),
    "--no-enable-prefix-caching",
)


class Measured(NamedTuple):
    goodput: float
    kv_tokens: int
    start_s: float
    probes: list[search.Probe]


class Load(NamedTuple):
    """What is sent at any rate: at least so many requests, for at least so long."""

    workload: str
    requests: int
    seconds: float
    seed: int

    def file(self, rate: float, setup: systems.Setup, tokenizer: Any) -> tuple[Path, int]:
        """The requests of one rate, and how many; all systems get the same."""
        count = max(self.requests, math.ceil(rate * self.seconds))
        path = setup.logs / f"requests-{count}.jsonl"
        if not path.exists():
            longest = setup.max_model_len
            given = (self.workload, count, longest, self.seed, console.print)
            workload.write_requests(path, tokenizer, *given)
        return path, count


class Speed:
    """What each system does with nothing else to do; written to `path` as they come."""

    def __init__(self, setup: systems.Setup, path: Path) -> None:
        self._logs, self._path = setup.logs, path
        config = json.loads((setup.model / "config.json").read_text())
        self._layers = int(config["num_hidden_layers"])
        self._found: dict[str, dict[str, float]] = {}
        self._steps: list[dict[str, Any]] = []

    def options(self, name: str) -> tuple[str, ...]:
        return step_profile.options(self._traces(name))

    def _traces(self, name: str) -> Path:
        return self._logs / f"traces-{name}"

    def measure(self, name: str, running: systems.Running) -> None:
        self._found[name] = model_speed.measure(running.base_url)
        with step_profile.recording(running.base_url):
            model_speed.decode(running.base_url, model_speed.DECODE_BATCHES[-1], 128)
        if step := step_profile.of_folder(self._traces(name), self._layers):
            print(f"{name}: a step of {step.period:.0f} us", step.kinds, flush=True)
            self._steps += step_profile.rows(name, step)
        ours, (other, plain) = self._found.get("expertplex"), list(self._found.items())[-1]
        if ours is None or other == "expertplex":
            ours, other, plain = plain, "", {}
        rows = model_speed.rows(self._layers, ours, plain, other)
        report("model-speed", rows + self._steps, self._path)


def measure(
    name: str,
    setup: systems.Setup,
    load: Load,
    targets: Targets,
    start: float,
    precision: float,
    most: int,
    inspect: Callable[[str, systems.Running], None],
) -> Measured:
    tokenizer = AutoTokenizer.from_pretrained(setup.model)
    with systems.SYSTEMS[name](setup) as running:
        console.print(f"{name}: started in {running.start_s:.0f} s, KV {running.kv_tokens} tokens")
        inspect(name, running)
        log = setup.logs / f"{name}-client.log"

        def probe(rate: float, most: int | None = None) -> search.Attainment:
            data, count = load.file(rate, setup, tokenizer)
            count = min(count, most or count)
            result = setup.logs / f"{name}-{rate:g}.json"
            given = (running.base_url, systems.MODEL_NAME, setup.model, data, rate, count)
            met = search.attainment(client.run(log, *given, result), targets)
            console.print(
                f"{name} at {rate:.3g}/s: TTFT {met.ttft:.0%}, TPOT {met.tpot:.0%}, "
                f"both {met.both:.0%} of {count}"
            )
            return met

        probe(start, 16)  # first use compiles kernels
        best, probes = search.goodput(probe, start, precision=precision, most=most)
    return Measured(best, running.kv_tokens, running.start_s, probes)


def show(found: dict[str, Measured]) -> None:
    table = Table(title="P90 goodput")
    for column in ("system", "goodput, req/s", "KV tokens", "start, s", "rates tried (both met)"):
        table.add_column(column)
    for name, m in found.items():
        tried = ", ".join(f"{p.rate:.3g} ({p.attainment.both:.0%})" for p in m.probes)
        table.add_row(name, f"{m.goodput:.3g}", str(m.kv_tokens), f"{m.start_s:.0f}", tried)
    console.print(table)


def plot(found: dict[str, Measured], path: Path) -> None:
    """Attainment of TTFT, TPOT and both over the rate: the paper's Fig. 7 to 10."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.5), sharey=True)
    for axis, field in zip(axes, search.Attainment._fields, strict=True):
        for name, m in found.items():
            rates = [p.rate for p in m.probes]
            axis.plot(rates, [getattr(p.attainment, field) for p in m.probes], "o-", label=name)
        axis.axhline(0.9, color="grey", linewidth=0.5)
        axis.set(title=field, xlabel="requests per second", xscale="log", ylim=(0, 1.05))
    axes[0].set_ylabel("share of all requests")
    axes[-1].legend()
    figure.tight_layout()
    figure.savefig(path)


def rows(found: dict[str, Measured]) -> list[Row]:
    """Ours beside each other system; ratios are those of goodput."""
    ours = found.get("expertplex")
    table = []
    for name, m in found.items():
        if ours and name != "expertplex":
            label = "goodput"
            table.append(Row(label, "req/s", ours.goodput, m.goodput, name, None))
        table.append(Row(f"{name} KV", "tokens", m.kv_tokens, None, "", None))
        for p in m.probes:
            for field in search.Attainment._fields:
                label = f"{name} {field} at {p.rate:.4g}/s"
                table.append(Row(label, "share", getattr(p.attainment, field), None, "", None))
    return table


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """What comes before the first `--`, and what after it."""
    cut = argv.index("--") if "--" in argv else len(argv)
    return argv[:cut], argv[cut + 1 :]


def parse(argv: list[str]) -> argparse.Namespace:
    """`serve` and `plain` are what came after the first and the second `--`."""
    argv, rest = split(argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="folder of the checkpoint")
    parser.add_argument(
        "--workload", default="1024/128", help="IN/OUT tokens, a trace file, or a planner workload"
    )
    parser.add_argument("--ttft", type=float, required=True, help="target, seconds")
    parser.add_argument("--tpot", type=float, required=True, help="target, seconds")
    parser.add_argument("--systems", default=",".join(systems.SYSTEMS))
    parser.add_argument("--layout", default="1P1D1E", help="of ExpertPlex")
    parser.add_argument("--colocated", choices=("tp", "dp"), default="tp", help="of vLLM's modes")
    parser.add_argument("--requests", type=int, default=200, help="per rate, at least")
    parser.add_argument("--seconds", type=float, default=60, help="of load per rate, at least")
    parser.add_argument("--start", type=float, default=1.0, help="first rate to try")
    parser.add_argument("--precision", type=float, default=0.05, help="of goodput, relative")
    parser.add_argument("--rates", type=int, default=30, help="to try at most")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for logs, vLLM's results and the plot")
    parser.add_argument("--json", type=str, help="write the rows to this file")
    parser.add_argument("--speed", type=Path, help="measure each system's speed, too, to this file")
    options = parser.parse_args(argv)
    options.serve, options.plain = split(rest)
    options.systems = options.systems.split(",")
    if unknown := set(options.systems) - set(systems.SYSTEMS):
        parser.error(f"--systems: {unknown} unknown; choose from {', '.join(systems.SYSTEMS)}")
    return options


def main() -> None:
    options = parse(sys.argv[1:])
    interrupt_on_sigterm()  # so that its servers end with it
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out or Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        setup = systems.Setup(
            *(options.model.resolve(), out, gpus, options.layout, options.colocated),
            options.max_model_len,
            (
                *("--max-model-len", str(options.max_model_len)),
                *(GPU_OPTIONS if gpus else ()),
                *options.serve,
            ),
            options.plain,
        )
        load = Load(options.workload, options.requests, options.seconds, options.seed)
        targets, found = Targets(options.ttft, options.tpot), {}
        speed = Speed(setup, options.speed) if options.speed else None
        for name in options.systems:
            begun = datetime.datetime.now()
            mine, inspect = setup, lambda name, running: None
            if speed:
                mine = setup._replace(options=(*setup.options, *speed.options(name)))
                inspect = speed.measure
            accuracy = options.precision, options.rates
            found[name] = measure(name, mine, load, targets, options.start, *accuracy, inspect)
            console.print(f"{name}: {(datetime.datetime.now() - begun).seconds} s")
            write("goodput", rows(found), options.json)
        show(found)
        if options.out:
            plot(found, out / "attainment.png")


if __name__ == "__main__":
    main()
