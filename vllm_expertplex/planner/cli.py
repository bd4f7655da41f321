"""`vllm-expertplex plan`. Owns: its options and flow. Must not know: how a plan is found."""

import argparse
import sys

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from vllm_expertplex.layout import Layout
from vllm_expertplex.planner.files import check_writable
from vllm_expertplex.planner.impossible import Infeasible, exit_code, explain
from vllm_expertplex.planner.plan import Plan, make_plan, write_plan
from vllm_expertplex.planner.report import print_plan
from vllm_expertplex.planner.search import (
    Candidate,
    fixed_layout,
    search,
    search_exhaustive,
)
from vllm_expertplex.planner.search_shared import search_shared
from vllm_expertplex.planner.setup import Setting, add_setting_arguments, setting_from
from vllm_expertplex.planner.sharing import PERCENTS, sms_of

HELP = "find the layout, parallelism and SM budget of the highest goodput; needs no GPU"
EPILOG = """examples:
  vllm-expertplex plan minimax-m2.7 --gpus 8 --gpu h200 --workload sharegpt --ttft 1 --tpot 0.05
  vllm-expertplex plan ./my-model/config.json --workload 2000/300 --output plan.json
  vllm-expertplex plan glm-5.1-fp8 --gpus 24 --gpu h800 --workload long-input --ttft 20 --tpot 0.1
  vllm-expertplex plan minimax-m2.7 --workload sharegpt --compare
  vllm-expertplex plan qwen3-235b-a22b --workload 4000/1 --executor asyncep"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_setting_arguments(parser)
    parser.add_argument(
        "--placement",
        choices=("auto", "alike", "free"),
        default="auto",
        help="alike: every node holds the same mix (auto: up to 8 whole nodes); free: any split",
    )
    parser.add_argument(
        "--executor",
        choices=("expertplex", "asyncep"),
        default="expertplex",
        help="asyncep: plan for answers of one token (classification, ranking, scoring)",
    )
    parser.add_argument("--layout", help="take this layout, e.g. 1P3D4E, and plan the rest")
    parser.add_argument(
        "--one",
        action="store_true",
        help="one deployment, even where several smaller ones of whole nodes would serve more",
    )
    parser.add_argument(
        "--shared",
        action="store_true",
        help="a MoE server on every GPU, beside the attention servers, as with fewer than 3 GPUs",
    )
    parser.add_argument("--exhaustive", action="store_true", help="Algorithm 1 as written; slower")
    parser.add_argument("--output", "-o", metavar="FILE", help="write the plan for `vllm serve`")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON, nothing else")
    parser.add_argument("--brief", action="store_true", help="leave the table of assumptions out")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="also simulate the other serving modes on this load and say which suits it",
    )


def run(args: argparse.Namespace) -> int:
    """Plan and print. Returns 1 when nothing serves the load and 2 for bad usage, with a reason
    on stderr.
    """
    try:
        _check(args)
        setting = setting_from(args)
        if args.executor == "asyncep":
            return _run_asyncep(setting, args)
        plan = find_plan(
            setting,
            args.gpus,
            args.placement,
            args.exhaustive,
            args.layout,
            not args.one,
            args.shared,
        )
        if args.output is not None:
            write_plan(plan, args.output)
    except ValueError as error:
        print(f"vllm-expertplex plan: {error}", file=sys.stderr)
        return exit_code(error)
    if args.json:
        print(msgspec.json.encode(plan).decode())
        return 0
    console = Console()
    print_plan(plan, console, assumptions=not args.brief)
    if args.output is not None:
        file = escape(args.output)
        console.print(f"written to {file}: vllm serve ... --expertplex-plan {file}")
    if args.compare:
        from vllm_expertplex.simulator.compare import compare

        compare(setting, plan.gpus, plan, console)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise ValueError for options that would be dropped silently, or cannot be written to."""
    check_writable("--output", args.output)
    if args.json and args.compare:
        raise ValueError("--json prints the plan and nothing else: leave out --json or --compare")
    shared = args.executor == "expertplex" and (args.shared or args.gpus < 3)
    if shared and (args.exhaustive or args.placement != "auto"):
        raise ValueError(
            "GPUs that servers share (--shared, or fewer than 3) have one placement, and all of it "
            "is tried: leave out --placement and --exhaustive"
        )
    if args.executor == "asyncep":
        for option in ("layout", "output", "compare", "shared"):
            if getattr(args, option) not in (None, False):
                raise ValueError(
                    f"--{option} is for --executor expertplex: an AsyncEP plan has no layout and "
                    f"no file, and its table compares with ExpertPlex; leave out --{option}"
                )


def _run_asyncep(setting: Setting, args: argparse.Namespace) -> int:
    from vllm_expertplex.planner.asyncep import plan_asyncep
    from vllm_expertplex.planner.asyncep_report import print_comparison

    found = plan_asyncep(setting, args.gpus)
    if args.json:
        print(msgspec.json.encode(found).decode())
    else:
        print_comparison(found, setting, args.gpus, Console())
    return 0


def find_plan(
    setting: Setting,
    gpus: int,
    placement: str = "auto",
    exhaustive: bool = False,
    layout: str | None = None,
    split: bool = False,
    shared: bool = False,
) -> Plan:
    """Search and explain. Raises `Infeasible` when nothing serves the load, or ValueError.

    split: also consider several equal deployments of whole nodes in place of one. shared: a MoE
    server on every GPU; fewer than three GPUs always are.
    """
    if shared or gpus < 3:
        return _find_shared(setting, gpus, layout)
    if layout is not None:
        given = Layout.parse(layout)
        servers = given.prefill + given.decode + given.moe
        if servers > gpus:
            raise ValueError(f"layout {given} needs more than the {gpus} GPUs given with --gpus")
        gpus = servers  # on as few nodes as hold them
        problem, space = setting.problem(gpus), setting.space(gpus, placement)
        fixed = fixed_layout(problem, space, given)
        if fixed is None:
            raise Infeasible(
                f"layout {given} cannot serve this load within memory and targets; leave --layout "
                "out to see whether another can"
            )
        return make_plan(setting, gpus, placement, fixed)
    finder = search_exhaustive if exhaustive else search
    best: Candidate | None = None
    copies = 1
    sizes = _divisions(gpus, setting.gpu.gpus_per_node) if split else [1]
    with Progress(transient=True, disable=gpus < 64, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=float(len(sizes)))
        for done, parts in enumerate(sizes, start=1):
            size = gpus // parts
            bar.update(task, description=f"searching {parts} x {size} GPUs")
            problem, space = setting.problem(size), setting.space(size, placement)
            found = finder(problem, space)
            bar.update(task, completed=done)
            if found and (best is None or found.goodput * parts > best.goodput * copies * 1.001):
                best, copies = found, parts
    if best is None:
        raise explain(setting, gpus, placement)
    return make_plan(setting, gpus // copies, placement, best, copies)


def _find_shared(setting: Setting, gpus: int, text: str | None) -> Plan:
    if gpus > setting.gpu.gpus_per_node:
        raise ValueError(
            f"--shared: a deployment is served by one node, of {setting.gpu.gpus_per_node} GPUs "
            f"here, found {gpus}; use fewer, or leave --shared out"
        )
    if setting.ranks not in (None, 1):
        raise ValueError(
            f"attention of {setting.ranks} ranks on GPUs that MoE servers share is not planned"
        )
    step, most = setting.assumptions.sm_step, sms_of(max(PERCENTS), setting.gpu.sms)
    if step >= most:
        raise ValueError(
            f"--set sm_step={step}: MoE servers hold at most {most} SMs of a GPU that they share, "
            "and decode's budget is less than all of them; use a smaller step"
        )
    layout = Layout.parse(text) if text is not None else None
    if layout and (layout.moe != gpus or max(layout.prefill, layout.decode) > gpus):
        raise ValueError(
            f"layout {layout} on {gpus} shared GPUs: expected {gpus} MoE servers, one on each, and "
            f"at most as many of prefill and of decode, for example 1P1D{gpus}E"
        )
    found = search_shared(setting, gpus, layout)
    if not found:
        raise explain(setting, gpus, "free", shared=True)
    (sharing, best), *rest = found
    return make_plan(
        setting._replace(sharing=sharing), gpus, "free", best, rest=[c for _, c in rest]
    )


def _divisions(gpus: int, node: int) -> list[int]:
    """Numbers of equal deployments of whole nodes that the GPUs can be divided into."""
    if gpus % node:
        return [1]
    return [k for k in range(1, gpus // node + 1) if gpus % (k * node) == 0]
