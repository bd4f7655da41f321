"""A plan of `vllm-expertplex plan` as options of the serve command.

Owns: what of a plan is served, and which plans cannot be. Must not know: how plans are found.
"""

import argparse
import math
from typing import TYPE_CHECKING

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm_expertplex.planner.plan import Plan

logger = init_logger(__name__)


def follow_plan(args: argparse.Namespace) -> dict[str, int]:
    """`follow` the plan in the file that was given, and keep to its limits on batches."""
    # numpy and the planner: only for those who have a plan.
    from vllm_expertplex.planner.plan import read_plan

    path = args.expertplex_plan
    if args.expertplex_layout is not None:
        raise ValueError("give --expertplex-plan or --expertplex-layout, not both")
    plan = read_plan(path)
    planned = follow(args, plan, f"--expertplex-plan {path}")
    # Unchunked, a step holds the longest prompt there may be, which vLLM sees to.
    if args.max_num_batched_tokens is None and args.enable_chunked_prefill is not False:
        args.max_num_batched_tokens = plan.max_prefill_tokens
    if args.max_num_seqs is None:
        most = args.max_num_batched_tokens or plan.max_decode_batch
        args.max_num_seqs = min(plan.max_decode_batch, most)
    return planned


def follow(args: argparse.Namespace, plan: "Plan", where: str) -> dict[str, int]:
    """Take layout and ranks from a plan, and return the options that it sets.

    `where`: what to call it in messages. Raises ValueError for one that cannot be run here.
    """
    from vllm_expertplex.planner.latency import TBO

    ranks = plan.prefill.tensor_parallel
    if plan.decode.tensor_parallel != ranks:
        raise ValueError(
            f"{where}: tensor parallelism {ranks} in prefill and "
            f"{plan.decode.tensor_parallel} in decode, and only one for both is served; choose a "
            "layout yourself with --expertplex-layout and --tensor-parallel-size"
        )
    if args.tensor_parallel_size not in (1, ranks):
        raise ValueError("give --expertplex-plan or --tensor-parallel-size, not both")
    if plan.copies > 1:
        raise ValueError(
            f"{where}: {plan.copies} deployments side by side; start each with "
            f"--expertplex-layout {plan.served} and its own port"
        )
    if plan.decode.overlap == TBO:
        logger.warning(
            "%s counts on two batches at once in decode, too, which are not served: TPOT will be "
            "longer than planned",
            where,
        )
    args.expertplex_layout, args.tensor_parallel_size = str(plan.served), ranks
    shares = {
        "moe_sm_percent": plan.moe_sm_percent,
        "prefill_sm_percent": plan.prefill_sm_percent,
    }
    return {name: percent for name, percent in shares.items() if percent is not None} | {
        # Its steps are full ones. Much smaller ones would rather not be cut.
        "tbo_tokens": plan.max_prefill_tokens // 2 if plan.prefill.overlap == TBO else 0,
        "decode_sms": plan.decode_sms,
        "expected_x_moe": max(1, math.ceil(plan.expects["x_moe"])),
    }
