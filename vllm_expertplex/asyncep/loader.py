"""Reading a checkpoint without the expert weights of other engines, or drawing random weights.

Owns: that filter, and where random weights are drawn. Must not know: what becomes of the weights.
"""

import dataclasses
from typing import Any

import torch
from vllm.config import LoadConfig, get_current_vllm_config
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.weight_utils import initialize_single_dummy_weight
from vllm.platforms import current_platform

from vllm_expertplex.asyncep.config import AsyncEPSettings
from vllm_expertplex.layout import ExpertMap

LOAD_FORMAT = "asyncep"
DUMMY_LOAD_FORMAT = "asyncep_dummy"


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


@register_model_loader(DUMMY_LOAD_FORMAT)
class DummyShardLoader(DummyModelLoader):
    """Random weights. Those that stay in host memory are drawn on the engine's device: vLLM draws
    them where they are, which on a CPU takes a minute for a few layers. Values are the same as
    those of a model that is there from the start.
    """

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        offloaded = [
            (parameter, parameter.data)
            for parameter in model.parameters()
            if parameter.device.type == "cpu" and not hasattr(parameter, "dummy_weight_value")
        ]
        for parameter, held in offloaded:
            parameter.data = held.new_empty(0)
        super().load_weights(model, model_config)
        for parameter, held in offloaded:
            drawn = torch.empty_like(held, device=current_platform.device_type)
            initialize_single_dummy_weight(drawn)
            parameter.data = held.copy_(drawn)
