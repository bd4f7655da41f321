"""Reading a checkpoint without the expert weights of other engines.

Owns: that filter. Must not know: what becomes of the weights.
"""

import dataclasses

from vllm.config import LoadConfig, get_current_vllm_config
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from vllm_expertplex.asyncep.config import AsyncEPSettings
from vllm_expertplex.layout import ExpertMap

LOAD_FORMAT = "asyncep"


def my_experts() -> list[int]:
    """Global ids of the experts that this process's engine holds, in order."""
    vllm_config = get_current_vllm_config()
    settings = AsyncEPSettings.from_additional_config(vllm_config.additional_config)
    if settings is None:
        raise RuntimeError("this engine was not started by --executor asyncep")
    experts = vllm_config.model_config.get_num_experts()
    return ExpertMap.contiguous(experts, settings.config.gpus).local_experts(settings.rank)


@register_model_loader(LOAD_FORMAT)
class ShardLoader(DefaultModelLoader):
    """vLLM's loader, which leaves experts out under vLLM's own expert parallelism."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(dataclasses.replace(load_config, load_format="auto"))

    def _init_ep_weight_filter(self, model_config: object) -> None:
        self.local_expert_ids = set(my_experts())
