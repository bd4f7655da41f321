"""Tiny random-weight checkpoints of real MoE architectures, a few megabytes each.

The model classes of `transformers` supply tensor names and shapes; this module picks the sizes and
draws the weights. The draws are scaled so that greedy output is varied text rather than one token
repeated, and so that tokens are routed differently, which is what tests of routing need.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from vllm_expertplex.checkpoints.folder import written_whole
from vllm_expertplex.checkpoints.tokenizer import BOS_ID, EOS_ID, VOCAB_SIZE, train_tokenizer

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "tie_word_embeddings": False,
}


# What `AutoConfig.for_model` gets on top of `_COMMON`; the key with "_" is the model type.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    # Sigmoid router with a selection bias, per-layer QK norm, rotary on half of each head.
    "minimax-m2": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 128,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "partial_rotary_factor": 0.5,
        },
        # Read by vLLM's model class, unknown to transformers' configuration.
        "rotary_dim": 32,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_mtp": False,
    },
    # Softmax router with renormalized weights, QK norm per head.
    "qwen3-moe": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
    },
    # Softmax router without renormalization, QKV bias, a gated shared expert.
    "qwen2-moe": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 256,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
    },
    # MLA; grouped sigmoid router with bias and scaling; a shared expert; a dense first layer.
    "deepseek-v3": {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,  # with 64, vLLM's kernels for GPUs do not take these heads
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
}

# The same, of attention that vLLM runs on GPUs only.
GPU_ARCHITECTURES: dict[str, dict[str, Any]] = {
    # GLM-5.1: MLA over the tokens that an indexer chooses, with its real head sizes, and of the
    # numbers of tokens that vLLM's kernels can choose the least.
    "glm-moe-dsa": {
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 512,
        "indexer_rope_interleave": True,  # read by vLLM alone; transformers always does so
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
}

# A linear weight is drawn with standard deviation gain / sqrt(inputs): an input of unit variance
# then gives an output of standard deviation `gain`. The last matching name wins.
_GAINS = {
    "weight": 1.5,
    "q_proj": 0.8,
    "k_proj": 0.8,
    "experts": 2.0,
    "mlp.gate.weight": 1.6,
    "shared_expert_gate": 1.0,
    "lm_head": 3.2,
}


def _draw(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """One tensor's random values in fp32, by what its name says it is."""
    if "norm" in name:
        return torch.ones(shape)
    noise = torch.randn(shape, generator=generator)
    if "embed_tokens" in name:
        return noise
    if "bias" in name:  # QKV bias, and the router's selection bias
        return noise * 0.1
    gain = [gain for part, gain in _GAINS.items() if part in name or part == "weight"][-1]
    return noise * (gain / shape[-1] ** 0.5)


def tiny_model(architecture: str, dtype: torch.dtype, seed: int = 0) -> Any:
    """The `transformers` model with random weights; the same seed draws the same values.

    The fp32 values are drawn first and then rounded, so both dtypes of a seed are the same model.
    Raises ValueError on an unknown architecture.
    """
    known = ARCHITECTURES | GPU_ARCHITECTURES
    if architecture not in known:
        raise ValueError(f"unknown architecture {architecture!r}: use one of {list(known)}")
    config = AutoConfig.for_model(architecture.replace("-", "_"), **_COMMON | known[architecture])
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    weights = {
        # vLLM keeps the router's selection bias in fp32 whatever the model's dtype.
        name: _draw(name, old.shape, generator).to(
            torch.float32 if "e_score_correction_bias" in name else dtype
        )
        for name, old in model.state_dict().items()
    }
    model.load_state_dict(weights, assign=True)
    model.generation_config = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=EOS_ID)
    return model


def make_tiny(out: Path, architecture: str, dtype: str = "bf16", seed: int = 0) -> None:
    """Write a tiny checkpoint (safetensors, config, tokenizer, chat template) to the folder `out`.

    `architecture` is a key of `ARCHITECTURES` or `GPU_ARCHITECTURES`, `dtype` a key of `DTYPES`.
    """
    with written_whole(out) as folder:
        tiny_model(architecture, DTYPES[dtype], seed).save_pretrained(folder)
        train_tokenizer().save_pretrained(folder)
