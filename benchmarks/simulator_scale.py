"""How long simulating 10,000 requests on many GPUs takes; the floor is one minute.

    python benchmarks/simulator_scale.py --json results.json

Every figure of the simulated deployments is simulated; only the run time is measured.
"""

import argparse
import time

from _report import Row, write
from rich.console import Console
from rich.table import Table

from vllm_expertplex.planner.cli import find_plan
from vllm_expertplex.planner.setup import setting
from vllm_expertplex.simulator.runs import Case, simulate

ALLOWED = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", default="8,64,512")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    table = Table(title=f"{args.requests} simulated requests, DeepSeek-V3 or MiniMax-M2.7 on H200")
    for name in ("GPUs", "mode", "layout", "req/s (simulated)", "in target", "run time (s)"):
        table.add_column(name, justify="right")
    rows: list[Row] = []
    for gpus in (int(n) for n in args.gpus.split(",")):
        name = "minimax-m2.7" if gpus < 16 else "deepseek-v3"
        given = setting(name, "h200", "sharegpt", 2, 0.1)
        plan = find_plan(given, gpus)
        for mode in ("expertplex", "pdd", "colocated"):
            options = {"plan": plan} if mode == "expertplex" else {}
            case = Case(setting=given, gpus=gpus, mode=mode, options=options)
            rate = plan.goodput * 0.7
            begin = time.perf_counter()
            result = simulate(case, rate, 0, args.requests)
            seconds = time.perf_counter() - begin
            layout = plan.layout if mode == "expertplex" else "-"
            table.add_row(
                str(gpus), mode, layout, f"{rate:.1f}", f"{result.attained:.1%}", f"{seconds:.1f}"
            )
            rows.append(Row(f"{gpus} GPUs, {mode}", "s", seconds, None, "", ALLOWED))
    Console().print(table)
    write("simulator_scale", rows, args.json)


if __name__ == "__main__":
    main()
