"""What a deployment on GPUs needs before its servers start: places, MPS, each role's own settings.

Owns: those. Must not know: processes, requests.
"""

from collections.abc import Sequence
from pathlib import Path

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform

from vllm_expertplex.config import ExpertPlexConfig
from vllm_expertplex.layout import PREFILL, Layout, Server
from vllm_expertplex.serve import mps
from vllm_expertplex.serve.gpu_memory import attention_shares, moe_bytes
from vllm_expertplex.serve.placement import Place, place, visible_gpus, write_places

logger = init_logger(__name__)


def prepare(
    run_dir: Path,
    config: ExpertPlexConfig,
    attention: Sequence[Server],
    vllm_configs: Sequence[VllmConfig],
) -> None:
    """Place all servers on the visible GPUs, and fit the attention servers' configurations.

    Raises ValueError or RuntimeError where this machine cannot hold the layout.
    """
    gpus = visible_gpus(current_platform.device_count())
    percents = config.prefill_sm_percent, config.moe_sm_percent
    ranks = config.tensor_parallel_size
    places = place(config.parsed_layout, gpus, *percents, ranks)
    for name, where in places.items():
        share = f", {where.sm_percent} % of its SMs" if where.sm_percent < 100 else ""
        logger.info("%s runs on GPU %s%s", name, where.gpu, share)
    if len(gpus) < (enough := config.parsed_layout.moe + ranks):
        logger.warning(
            "MoE servers share GPUs with attention servers: they hold %d %% of the SMs, also while "
            "they have nothing to do. With %d GPUs they have their own",
            config.moe_sm_percent,
            enough,
        )
    shares = _memory_shares(config.parsed_layout, places, vllm_configs[0])
    write_places(run_dir, places)
    if any(where.mps for where in places.values()):
        mps.start(run_dir)
    for server, vllm_config in zip(attention, vllm_configs, strict=True):
        fit(vllm_config, server, shares[server.name])


def _memory_shares(
    layout: Layout, places: dict[str, Place], vllm_config: VllmConfig
) -> dict[str, float]:
    """Attention server name -> its part of its GPU's memory."""
    part = 0.0
    if any(places[moe.name].servers > 1 for moe in layout.moe_servers):
        part = moe_bytes(vllm_config, layout) / current_platform.get_device_total_memory()
    utilization = vllm_config.cache_config.gpu_memory_utilization
    return attention_shares(layout, places, part, utilization)


def fit(config: VllmConfig, server: Server, memory_share: float) -> None:
    """Settings of one attention server that follow from its role and place."""
    config.cache_config.gpu_memory_utilization = memory_share
    compilation = config.compilation_config
    if server.role == PREFILL:
        # Graphs replay batches of known small sizes; prefill's are large and of any size. Where
        # vLLM itself decides against graphs, it drops their sizes, too.
        compilation.cudagraph_mode = CUDAGraphMode.NONE
        compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = [], 0
    elif compilation.cudagraph_mode is CUDAGraphMode.FULL_AND_PIECEWISE:
        # vLLM's default, whose second half is for steps with prompts in them. Here only a lost
        # prompt is computed again by decode, too rarely for a graph per layer and size.
        compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
