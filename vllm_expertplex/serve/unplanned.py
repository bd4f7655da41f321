"""A layout where none and no plan is given, for the GPUs there are.

Owns: what is assumed of a load that nobody described. Must not know: how plans are found, and how
one is served.
"""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from vllm_expertplex.serve.planned import follow

if TYPE_CHECKING:
    from vllm_expertplex.planner.plan import Plan

logger = init_logger(__name__)

WORKLOAD, TTFT_S, TPOT_S = "sharegpt", 1.0, 0.05
HOPPER = ("h100", "h200", "h800")  # of those the planner knows
OVERLAPPED_TOKENS = 2048  # of a prefill step that is cut in two: what was measured on shared GPUs


def choose(args: argparse.Namespace) -> dict[str, int]:
    """Take a layout for all visible GPUs, and return the options that go with it.

    From three GPUs on a planned one. Fewer, or experts that would not fit beside GPUs for
    attention: one prefill and one decode server, and experts on every GPU, which is the best that
    was measured (docs/gpu-measured.md). On CPUs, and, with a warning, where nothing can be planned,
    it stays what it is by default.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu() or not (gpus := current_platform.device_count()):
        return {}  # without a GPU the deployment says so
    name = current_platform.get_device_name()
    ranks, why = args.tensor_parallel_size, "so few GPUs share experts and attention"
    if gpus >= 3 or ranks > 1:
        from vllm_expertplex.planner.impossible import Infeasible

        try:
            plan = _plan(args, gpus, name)
        except (ValueError, OSError) as error:
            if ranks > 1 or not isinstance(error, Infeasible):
                logger.warning("No --expertplex-layout was given and none is planned: %s", error)
                return {}
            why = str(error)
        else:
            logger.info(
                "No --expertplex-layout was given: %s is planned for %d x %s, ShareGPT lengths, "
                "TTFT %g s and TPOT %g s. `vllm-expertplex plan` says why, and plans other loads.",
                *(plan.served, gpus, name, TTFT_S, TPOT_S),
            )
            return follow(args, plan, f"a plan for {gpus} x {plan.gpu}")
    args.expertplex_layout = f"1P1D{gpus}E"
    logger.info("No --expertplex-layout was given: %s, as %s", args.expertplex_layout, why)
    return {"tbo_tokens": OVERLAPPED_TOKENS}


def _plan(args: argparse.Namespace, gpus: int, name: str) -> "Plan":
    # numpy and the planner: only for those who need a plan.
    from vllm_expertplex.planner.cli import find_plan
    from vllm_expertplex.planner.hardware import load_gpu
    from vllm_expertplex.planner.model_configs import load_model
    from vllm_expertplex.planner.setup import setting

    known = re.search(rf"\b({'|'.join(HOPPER)})\b", name.lower())
    # Those on PCIe have fewer SMs, and a MIG instance has a part of them.
    if known is None or re.search("pcie|mig", name.lower()):
        raise ValueError(f"{name} is none of the GPUs it is planned for: {', '.join(HOPPER)} (SXM)")
    model = getattr(args, "model_tag", None) or args.model
    spec = load_model(_config(model, args), called=model)
    found = setting(spec, load_gpu(known[1]), WORKLOAD, TTFT_S, TPOT_S)
    # Attention of several ranks costs collectives: only for those who ask for it.
    return find_plan(found._replace(ranks=args.tensor_parallel_size), gpus)


def _config(model: str, args: argparse.Namespace) -> str:
    """The file that describes a model, fetched if the model is a name on a hub."""
    if Path(model).expanduser().exists():
        return model
    from huggingface_hub import hf_hub_download

    return hf_hub_download(model, "config.json", revision=args.revision, token=args.hf_token)
