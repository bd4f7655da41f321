"""A plan where none and no layout is given: the planner's, for the GPUs there are.

Owns: what is assumed of a load that nobody described. Must not know: how plans are found, and how
one is served.
"""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm_expertplex.planner.plan import Plan

logger = init_logger(__name__)

WORKLOAD, TTFT_S, TPOT_S = "sharegpt", 1.0, 0.05


def plan_here(args: argparse.Namespace) -> "Plan | None":
    """A plan for all visible GPUs. None on CPUs, and, with a warning, where there is no plan."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() or not (gpus := current_platform.device_count()):
        return None  # without a GPU the deployment says so
    name = current_platform.get_device_name()
    try:
        plan = _plan(args, gpus, name)
    except (ValueError, OSError) as error:
        logger.warning("No --expertplex-layout was given and none is planned: %s", error)
        return None
    logger.info(
        "No --expertplex-layout was given: %s is planned for %d x %s, ShareGPT lengths, TTFT %g s "
        "and TPOT %g s. `vllm-expertplex plan` says why, and plans for other loads.",
        *(plan.served, gpus, name, TTFT_S, TPOT_S),
    )
    return plan


def _plan(args: argparse.Namespace, gpus: int, name: str) -> "Plan":
    # numpy and the planner: only for those who need a plan.
    from vllm_expertplex.planner.cli import find_plan
    from vllm_expertplex.planner.hardware import GPUS, load_gpu
    from vllm_expertplex.planner.impossible import Infeasible
    from vllm_expertplex.planner.model_configs import load_model
    from vllm_expertplex.planner.setup import setting

    known = re.search(rf"\b({'|'.join(GPUS)})\b", name.lower())
    # Those on PCIe have fewer SMs, and a MIG instance has a part of them.
    if known is None or re.search("pcie|mig", name.lower()):
        raise ValueError(f"{name} is none of the GPUs the planner knows: {', '.join(GPUS)}")
    model = getattr(args, "model_tag", None) or args.model
    spec = load_model(_config(model, args), called=model)
    found = setting(spec, load_gpu(known[1]), WORKLOAD, TTFT_S, TPOT_S)
    # Attention of several ranks costs collectives: only for those who ask for it.
    found = found._replace(ranks=args.tensor_parallel_size)
    try:
        return find_plan(found, gpus)
    except Infeasible as apart:
        try:  # experts on every GPU, beside attention, need less of each
            return find_plan(found, gpus, shared=True)
        except ValueError:
            raise apart from None


def _config(model: str, args: argparse.Namespace) -> str:
    """The file that describes a model, fetched if the model is a name on a hub."""
    if Path(model).expanduser().exists():
        return model
    from huggingface_hub import hf_hub_download

    return hf_hub_download(model, "config.json", revision=args.revision, token=args.hf_token)
