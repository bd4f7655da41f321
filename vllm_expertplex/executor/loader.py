"""Reading a checkpoint in parts: attention servers skip experts, MoE servers skip the rest.

Owns: which tensors a server reads, and dequantising what vLLM's CPU layers cannot take in FP8.
Must not know: what the tensors are used for.
"""

import dataclasses
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import torch
from vllm.config import LoadConfig, VllmConfig, get_current_vllm_config
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform

from vllm_expertplex.quantization import QuantScheme, dequantise, quant_scheme

LOAD_FORMAT = "expertplex"

_SCALE = ".weight_scale_inv"


def is_expert_weight(name: str) -> bool:
    """Whether a checkpoint tensor belongs to a routed expert (shared experts do not)."""
    return ".experts." in name


def without_fp8(
    weights: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Replace FP8 tensors and their 128 x 128 block scales by dequantised ones of `dtype`."""
    waiting: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        stem = name.removesuffix(_SCALE) if name.endswith(_SCALE) else name.removesuffix(".weight")
        if not name.endswith(_SCALE) and tensor.dtype != torch.float8_e4m3fn:
            yield name, tensor
        elif stem not in waiting:
            waiting[stem] = tensor
        else:
            pair = (waiting.pop(stem), tensor)
            weight, scale = pair if pair[0].dtype == torch.float8_e4m3fn else pair[::-1]
            yield f"{stem}.weight", dequantise(weight, scale).to(dtype)
    if waiting:
        raise ValueError(
            f"FP8 tensors without their block scales: {', '.join(sorted(waiting)[:3])}; "
            "the checkpoint is incomplete"
        )


def _stock(load_config: LoadConfig) -> LoadConfig:
    """The same configuration with a load format that vLLM's own loader knows."""
    return dataclasses.replace(load_config, load_format="auto")


def weights_of(
    vllm_config: VllmConfig, model: Any, local_experts: set[int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of the checkpoint, without reading the expert weights outside `local_experts`."""
    loader = DefaultModelLoader(_stock(vllm_config.load_config))
    loader.local_expert_ids = local_experts
    yield from loader.get_all_weights(vllm_config.model_config, model)


@register_model_loader(LOAD_FORMAT)
class AttentionLoader(DefaultModelLoader):
    """vLLM's loader without routed experts: they are neither read nor created."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(_stock(load_config))

    def _init_ep_weight_filter(self, model_config: Any) -> None:
        self.local_expert_ids: set[int] = set()

    def get_all_weights(
        self, model_config: Any, model: Any
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        weights = (
            (name, tensor)
            for name, tensor in super().get_all_weights(model_config, model)
            if not is_expert_weight(name)
        )
        dequantise_all = (
            current_platform.is_cpu()
            and quant_scheme(get_current_vllm_config()) is QuantScheme.FP8_BLOCK
        )
        yield from without_fp8(weights, model_config.dtype) if dequantise_all else weights
