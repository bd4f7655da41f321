"""What a deployment takes from vLLM's configuration."""

from types import SimpleNamespace
from typing import Any

from transformers import Qwen3VLMoeConfig

from vllm_expertplex.asyncep.deployment import _model_of


def test_the_weights_of_a_multimodal_model_are_in_the_format_of_its_outer_config() -> None:
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    text = Qwen3VLMoeConfig(quantization_config=blocks).text_config
    assert "quantization_config" not in text.to_dict()
    arch = SimpleNamespace(quantization_config=blocks)  # where vLLM has found it
    config = SimpleNamespace(model="m", hf_text_config=text, model_arch_config=arch)
    vllm_config: Any = SimpleNamespace(model_config=config)
    model = _model_of(vllm_config)
    assert model.experts == text.num_experts
    assert model.expert_bytes == 1 + 4 / 128**2
