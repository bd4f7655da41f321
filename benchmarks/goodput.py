"""P90 goodput of ExpertPlex and of vLLM's own ways to serve, on the same GPUs, model and requests.

    python benchmarks/goodput.py MODEL --system expertplex=1P1D1E --system chunked-tp \\
        --workload sharegpt@20 --workload 4000/128@8 --ttft 1 --tpot 0.05 --out DIR
    python benchmarks/goodput.py --merge DIR1/measured.jsonl DIR2/measured.jsonl --json FILE \\
        --figures DIR

Goodput is the highest Poisson rate at which at least 90 % of all requests, failures included, meet
both targets; found by bisection with the arrivals, requests and timing of vLLM's benchmark client.
A request that is not done in the time that both targets leave it has missed them. A rate is left as
soon as its verdict is certain, so shares are of the requests that were decided until then.

Each system is started once: measured with nothing else to do where --speed names it (see
model_speed.py, step_profile.py), then searched on every workload. For each it prints and keeps the
KV budget and the attainment of TTFT, TPOT and both at every rate tried. --together starts vLLM's
own systems all at once, which takes as long as one; they share the GPUs' memory, so give them
--kv-cache-memory-bytes, and are measured in turn while the others idle. Without GPUs everything
runs on CPU, which serves tiny models only.

Options after `--` go to every `vllm serve`, after a second `--` to vLLM's own systems only. With a
model of fewer layers, scale the targets: host time, which is the same for each step of any number
of layers, then weighs more than in the whole model.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import threading
from pathlib import Path

import torch
from rich.console import Console
from slo import client, results, systems, workload
from slo.run import Run
from slo.systems import interrupt_on_sigterm

from vllm_expertplex.planner.workload import Targets

# Of every system, before the caller's own. The defaults of the servers' tests suit tiny models.
GPU_OPTIONS = (
    *("--no-enforce-eager", "--max-num-batched-tokens", "8192", "--max-num-seqs", "256"),
    "--no-enable-prefix-caching",
)


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
    parser.add_argument("model", type=Path, nargs="?", help="folder of the checkpoint")
    parser.add_argument(
        "--system",
        action="append",
        default=[],
        metavar="SYSTEM",
        help=f"{', '.join(systems.PLAIN)}, or expertplex[=LAYOUT][+KEY=VALUE...]; several times",
    )
    parser.add_argument(
        "--workload",
        action="append",
        default=[],
        metavar="NAME[@START[,TTFT,TPOT]]",
        help="IN/OUT tokens, a trace file, or a planner workload; the first rate to try (default "
        "1/s), targets of its own; several times",
    )
    parser.add_argument("--ttft", type=float, default=1.0, help="target, seconds (default 1)")
    parser.add_argument("--tpot", type=float, default=0.05, help="target, seconds (default 0.05)")
    parser.add_argument("--speed", action="append", default=[], metavar="SYSTEM", help="see above")
    parser.add_argument("--together", action="store_true", help="see above")
    parser.add_argument("--requests", type=int, default=200, help="per rate, at least")
    parser.add_argument("--seconds", type=float, default=60, help="of arrivals per rate, at least")
    parser.add_argument("--step", type=float, default=2, help="first factor between rates")
    parser.add_argument("--precision", type=float, default=0.05, help="of goodput, relative")
    parser.add_argument("--rates", type=int, default=30, help="to try at most, per workload")
    parser.add_argument(
        "--search-seconds",
        type=float,
        default=math.inf,
        help="after which no further rate is tried, per workload",
    )
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for measured.jsonl, logs, every request")
    parser.add_argument(
        "--merge",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="measured.jsonl of other calls: reported, too, and where they gave way the search "
        "begins; alone without a model",
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--figures", type=Path, help="folder for a figure of each workload")
    options = parser.parse_args(argv)
    options.serve, options.plain = split(rest)
    try:
        options.systems = [systems.parse(text) for text in options.system]
        options.speed = [systems.parse(text).name for text in options.speed]
        targets = Targets(options.ttft, options.tpot)
        options.workloads = [workload.parse(text, 1.0, targets) for text in options.workload]
    except ValueError as error:
        parser.error(str(error))
    if options.model and not (options.systems and options.workloads and options.out):
        parser.error("to measure a model, give --system, --workload and --out")
    if not (options.model or options.merge):
        parser.error("give a model to measure, or --merge files to report")
    if unknown := set(options.speed) - {system.name for system in options.systems}:
        parser.error(f"--speed {', '.join(unknown)}: give it as --system, too")
    if options.together and any(system.ours for system in options.systems):
        parser.error("--together: ExpertPlex shares its GPUs with no other deployment")
    return options


def main() -> None:
    options = parse(sys.argv[1:])
    interrupt_on_sigterm()  # so that its servers end with it
    files, failed = options.merge, []
    if options.model:
        # Takes seconds, and is not needed before a system runs.
        importing = threading.Thread(target=importlib.import_module, args=(client.VLLM,))
        importing.start()
        options.out.mkdir(parents=True, exist_ok=True)
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        longest = ("--max-model-len", str(options.max_model_len))
        serve = (*longest, *(GPU_OPTIONS if gpus else ()), *options.serve)
        given = options.model.resolve(), options.out, gpus, options.max_model_len
        run = Run(options, systems.Setup(*given, serve, options.plain))
        groups = [options.systems] if options.together else [[s] for s in options.systems]
        for group in groups:
            run.measure(group)
        files, failed = [*files, run.file], run.failed
    console = Console(width=160)
    records = results.read(path for path in files if path.exists())
    results.show(records, console)
    if options.json:
        results.write(records, options.json)
    if options.figures:
        results.plot(records, options.figures)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
