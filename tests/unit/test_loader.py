"""Reading a checkpoint in parts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3VLMoeConfig
from vllm.config import ModelConfig

from vllm_expertplex.checkpoints.fp8 import quantize
from vllm_expertplex.executor.loader import is_expert_weight, without_fp8
from vllm_expertplex.quantization import QuantScheme, quant_scheme, scheme_of


@pytest.mark.parametrize(
    ("name", "expert"),
    [
        ("model.layers.0.mlp.experts.3.gate_proj.weight", True),
        ("model.layers.0.block_sparse_moe.experts.15.w2.weight_scale_inv", True),
        ("model.layers.0.mlp.experts.gate_up_proj", True),
        ("model.layers.0.mlp.shared_experts.up_proj.weight", False),
        ("model.layers.0.mlp.shared_expert.up_proj.weight", False),
        ("model.layers.0.mlp.gate.weight", False),
        ("model.layers.0.self_attn.q_proj.weight", False),
    ],
)
def test_routed_experts_are_told_from_the_rest(name: str, expert: bool) -> None:
    assert is_expert_weight(name) == expert


def test_fp8_tensors_are_dequantised_in_whatever_order_they_come() -> None:
    torch.manual_seed(0)
    weights = {name: torch.randn(128, 256) for name in ("a", "b")}
    pairs = {name: quantize(weight) for name, weight in weights.items()}
    plain = torch.randn(3).bfloat16()
    stream = [
        ("a.weight", pairs["a"][0]),
        ("norm.weight", plain),
        ("b.weight_scale_inv", pairs["b"][1]),
        ("b.weight", pairs["b"][0]),
        ("a.weight_scale_inv", pairs["a"][1]),
    ]
    found = dict(without_fp8(stream, torch.bfloat16))
    assert found.keys() == {"a.weight", "b.weight", "norm.weight"}
    assert found["norm.weight"] is plain
    for name, (quantized, scale) in pairs.items():
        exact = quantized.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        assert torch.equal(found[f"{name}.weight"], exact.bfloat16())


def test_fp8_without_scales_is_refused_by_name() -> None:
    quantized, _ = quantize(torch.randn(128, 128))
    with pytest.raises(ValueError, match=r"without their block scales: layer\.q;"):
        list(without_fp8([("layer.q.weight", quantized)], torch.bfloat16))


BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def test_schemes_are_recognised() -> None:
    assert scheme_of(None, None) is QuantScheme.NONE
    assert scheme_of(BLOCKS, None) is QuantScheme.FP8_BLOCK
    assert scheme_of(BLOCKS, "fp8") is QuantScheme.FP8_BLOCK


@pytest.mark.parametrize("outer", [True, False])
def test_the_scheme_of_a_multimodal_model_stands_in_either_config(outer: bool) -> None:
    whole = Qwen3VLMoeConfig()
    (whole if outer else whole.text_config).quantization_config = dict(BLOCKS)
    model: Any = SimpleNamespace(
        hf_config=whole,
        hf_text_config=whole.text_config,
        quantization="fp8",  # as vLLM sets it
        _supports_multimodal_for_mm_prefix=lambda: True,
    )
    model.model_arch_config = ModelConfig.get_model_arch_config(model)
    assert quant_scheme(SimpleNamespace(model_config=model)) is QuantScheme.FP8_BLOCK


@pytest.mark.parametrize(
    ("config", "requested", "named"),
    [
        ({"quant_method": "fp8"}, None, r"'fp8' \(weight_block_size None\)"),
        ({"quant_method": "fp8", "weight_block_size": [64, 128]}, None, r"\[64, 128\]"),
        ({"quant_method": "awq"}, None, "'awq'"),
        ({"quant_method": "gptq", "weight_block_size": [128, 128]}, None, "'gptq'"),
        (None, "fp8", "'fp8'"),
    ],
)
def test_other_schemes_are_refused_with_what_is_supported(
    config: dict[str, object] | None, requested: str | None, named: str
) -> None:
    with pytest.raises(ValueError, match=rf"{named}.*128x128 blocks"):
        scheme_of(config, requested)
