"""Which weight formats ExpertPlex serves, how a checkpoint's is recognised, and what it means.

Owns: the scheme of a model's experts, its values in fp32. Must not know: servers, kernels.
"""

import enum
from typing import Any

import torch

BLOCK = 128  # rows and columns under one FP8 block scale


class QuantScheme(enum.Enum):
    """How the experts of a checkpoint are stored."""

    NONE = "none"  # bf16, fp16 or fp32
    FP8_BLOCK = "fp8_block"  # e4m3 with fp32 scales of 128 x 128 blocks (DeepSeek-V3, MiniMax-M2)


def quant_scheme(vllm_config: Any) -> QuantScheme:
    """The scheme of the model in `vllm_config`. Raises ValueError naming what is supported.

    Of multimodal models either the outer config or that of the text model says it; vLLM knows where
    (transformers_utils/model_arch_config_convertor.py).
    """
    model = vllm_config.model_config
    return scheme_of(model.model_arch_config.quantization_config, model.quantization)


def scheme_of(quantization_config: dict[str, Any] | None, requested: str | None) -> QuantScheme:
    """The scheme of a checkpoint's `quantization_config`, with vLLM's `--quantization` value."""
    if quantization_config is None and requested is None:
        return QuantScheme.NONE
    config = quantization_config or {}
    method = config.get("quant_method", requested)
    if method == "fp8" and list(config.get("weight_block_size") or []) == [128, 128]:
        return QuantScheme.FP8_BLOCK
    raise ValueError(
        f"quantization {method!r} (weight_block_size {config.get('weight_block_size')}) is not "
        "supported by ExpertPlex; use an unquantised checkpoint or one with FP8 weights in "
        "128x128 blocks"
    )


def dequantise(weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """fp32 values of a weight [rows, columns], FP8 with 128 x 128 block scales or plain."""
    if scale is None:
        return weight.float()
    rows, columns = weight.shape
    expanded = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return weight.float() * expanded
