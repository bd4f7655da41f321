"""Plans of two shared GPUs against the goodput that was measured on them; nothing is fitted.

    python benchmarks/planner_shared.py --json FILE

The runs are those of `results/goodput-h200-x2.jsonl`: MiniMax-M2.7's dimensions with 16 of 62
layers, dummy weights (which route evenly), on two H200s. For each layout and its shares: the
planner's goodput with its best SM budget for decode; the simulated one with that budget; and the
simulated one where decode may have all SMs of the MoE servers, as in the runs, which did not set
`decode_sms`. Then what other budgets do to long prompts, which nobody has measured.

Kernel times are the GPU's rates; or the profile, whose decode experts are those of the kernel
before its tiles became twice as wide; or rates with the time that a decode step's attention server
took in a trace (`results/model_speed_compiled-h200-x2.json`, before attention servers saw only the
SMs that are left to them).
"""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import msgspec
from _report import Row, write
from rich.console import Console
from rich.progress import track
from rich.table import Table
from simulator_gpu_runs import PROFILE, SERVED_CONTEXT, SERVED_LAYERS, shortened

from vllm_expertplex.layout import Layout
from vllm_expertplex.planner.assumptions import Assumptions
from vllm_expertplex.planner.hardware import GPUS
from vllm_expertplex.planner.kernels import Roofline
from vllm_expertplex.planner.plan import Plan, make_plan
from vllm_expertplex.planner.profile import ProfiledKernels, read_profile
from vllm_expertplex.planner.search_shared import best_way
from vllm_expertplex.planner.setup import Setting, setting
from vllm_expertplex.planner.sharing import Sharing, sms_of
from vllm_expertplex.planner.workload import load_workload
from vllm_expertplex.simulator.runs import Case, goodput

MEASURED = Path(__file__).parent / "results" / "goodput-h200-x2.jsonl"
TRACE = MEASURED.with_name("model_speed_compiled-h200-x2.json")
KERNELS = ("rates", "profile", "traced")
HOLDS, SEEDS = 0.9, 2
LONG, BATCH = "4000/128", 16
SERVED = (
    Sharing(Layout(1, 1, 2), 40, 100),
    Sharing(Layout(1, 1, 2), 50, 100),
    Sharing(Layout(1, 1, 2), 60, 100),
    Sharing(Layout(2, 1, 2), 50, 69),
)


class Goodput(NamedTuple):
    """Requests/s: the highest rate that held, and the lowest that did not."""

    held: float
    failed: float


def measured(sharing: Sharing, workload: str) -> Goodput | None:
    """Of the runs, all of those with the same options taken together."""
    options = f"+tbo_tokens=2048+moe_sm_percent={sharing.moe_sm_percent}"
    if sharing.crowded:
        options += f"+prefill_sm_percent={sharing.prefill_sm_percent}"
    probes = [
        probe
        for run in map(json.loads, MEASURED.read_text().splitlines())
        if (run["system"], run["workload"]) == (f"expertplex={sharing.layout}{options}", workload)
        for probe in run["probes"]
    ]
    if not probes:
        return None
    failed = min(rate for rate, (*_, both), _ in probes if both < HOLDS)
    held = max(rate for rate, (*_, both), _ in probes if both >= HOLDS and rate < failed)
    return Goodput(held, failed)


def given(workload: str, source: str) -> Setting:
    """What was served, and the load with the lengths that were sent."""
    run = json.loads(MEASURED.read_text().splitlines()[0])
    load = load_workload(workload)
    if "/" in workload:  # exactly so many tokens
        load = msgspec.structs.replace(load, sigma=0.0)
    assumed = Assumptions(routing_sigma=0.0)
    if source == "traced":
        assumed = msgspec.structs.replace(assumed, attention_floor_decode=traced_floor(assumed))
    found = setting("minimax-m2.7", "h200", load, run["ttft"], run["tpot"], assumed)
    model = shortened(SERVED_LAYERS)
    rates = Roofline(model, found.gpu, assumed)
    if source == "profile":
        rates = ProfiledKernels(read_profile(str(PROFILE)), model, rates)
    return found._replace(model=model, kernels=rates)


def traced_floor(assumed: Assumptions) -> float:
    """Seconds a layer: `attention_floor_decode` with which a traced decode step's time without MoE
    servers and exchange is met.
    """
    rows = {row["name"]: row["ours"] for row in json.loads(TRACE.read_text())["rows"]}
    step, moe, dispatch = (
        rows[f"decode step of 64, {part}"]
        for part in ("from a trace, per layer", "MoE servers and combine, per layer",
                     "dispatch, per layer")
    )  # fmt: skip
    shares = Sharing(Layout(1, 1, 2), 60, 100).shares(GPUS["h200"].sms)  # as it was traced
    speed = min(1.0, float(shares.decode) / assumed.hbm_saturation)
    kernels = Roofline(shortened(SERVED_LAYERS), GPUS["h200"], assumed)
    work = float(kernels.decode_attention(64, SERVED_CONTEXT, 1)) / SERVED_LAYERS
    work -= assumed.attention_floor_decode
    return (step - moe - dispatch) * 1e-6 - work / speed


def planned(setting_: Setting, sharing: Sharing) -> Plan | None:
    found = best_way(setting_, [sharing])
    return found and make_plan(setting_._replace(sharing=sharing), 2, "free", found[1], rest=[])


def simulated(setting_: Setting, plan: Plan, decode_sms: int, batch: int) -> float:
    """Goodput where decode has `decode_sms` at `batch` requests, and in proportion (eq. 4)."""
    expected = msgspec.structs.replace(plan.decode, batch=batch)
    plan = msgspec.structs.replace(plan, decode_sms=decode_sms, decode=expected)
    # a step that may end up with all SMs but one pair
    fine = msgspec.structs.replace(setting_.assumptions, sm_step=2)
    case = Case(
        setting=setting_._replace(assumptions=fine), gpus=2, mode="expertplex",
        options={"plan": plan},
    )  # fmt: skip
    return goodput(case, SEEDS, plan.goodput).mean


def unlimited(setting_: Setting, plan: Plan) -> float:
    return simulated(setting_, plan, plan.gpu_sms, 1)


def against_runs(rows: list[Row]) -> Table:
    table = Table(title="Goodput on two H200s, requests/s")
    for name in ("load, layout, moe_sm_percent", "measured (failed)", "kernels", "planned",
                 "decode_sms", "batch P / D", "simulated with it", "without"):  # fmt: skip
        table.add_column(name, justify="left" if name.startswith("load") else "right")
    cases = [
        (workload, sharing, source)
        for workload in ("sharegpt", "azure-chat", LONG)
        for sharing in SERVED
        if not sharing.crowded or workload == LONG
        for source in KERNELS
    ]
    for workload, sharing, source in track(cases, "planning and simulating"):
        what = f"{workload}, {sharing.layout}, {sharing.moe_sm_percent}"
        setting_, found = given(workload, source), measured(sharing, workload)
        plan = planned(setting_, sharing)
        assert plan is not None
        values = {
            "planned": plan.goodput,
            "simulated with its decode_sms": simulated(
                setting_, plan, plan.decode_sms, plan.decode.batch
            ),
            "simulated": unlimited(setting_, plan),
        }
        for name, value in values.items():
            peer = found.held if found else None
            rows.append(Row(f"{what}: {name} ({source})", "req/s", value, peer, "measured", None))
        shown = [f"{value:.1f}" for value in values.values()]
        table.add_row(
            what, f"{found.held:.1f} ({found.failed:.1f})" if found else "", source, shown[0],
            str(plan.decode_sms), f"{plan.prefill.batch} / {plan.decode.batch}", *shown[1:],
        )  # fmt: skip
    return table


def budgets(rows: list[Row]) -> Table:
    """Long prompts with decode limited to `decode_sms` at BATCH requests."""
    table = Table(title=f"{LONG}, simulated, by decode_sms at a decode batch of {BATCH}")
    for name in ("moe_sm_percent, decode_sms", *KERNELS):
        table.add_column(name, justify="right")
    found: dict[str, list[str]] = {}
    cases = [(s, source) for s in SERVED if not s.crowded for source in KERNELS]
    for sharing, source in track(cases, "budgets"):
        setting_ = given(LONG, source)
        plan = planned(setting_, sharing)
        assert plan is not None
        for sms in range(24, sms_of(sharing.moe_sm_percent, plan.gpu_sms), 6):
            what = f"{sharing.moe_sm_percent}, {sms}"
            value = simulated(setting_, plan, sms, BATCH)
            found.setdefault(what, []).append(f"{value:.1f}")
            name = f"{LONG}, {sharing.layout}, {what} SMs for decode: simulated ({source})"
            rows.append(Row(name, "req/s", value, None, "measured", None))
    for what, values in found.items():
        table.add_row(what, *values)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    rows: list[Row] = []
    console = Console(width=160)
    for tables in (against_runs, budgets):
        console.print(tables(rows))
    write("planner_shared", rows, args.json)


if __name__ == "__main__":
    main()
