"""Models of real layers for `asyncep.py`: configurations without weights.

Their weights are vLLM's dummies: small random numbers, whose router spreads different tokens over
all experts.
"""

from pathlib import Path
from typing import Any

import model_speed

QWEN3_235B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "head_dim": 128,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 262144,
    "rope_theta": 5e6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "quantization_config": {
        **model_speed.M27["quantization_config"],
        "modules_to_not_convert": [
            "lm_head",
            *(f"model.layers.{layer}.mlp.gate" for layer in range(94)),
        ],
    },
}
MODELS = {"minimax-m2.7": model_speed.M27, "qwen3-235b-a22b": QWEN3_235B}


def write_model(folder: Path, name: str, layers: int) -> None:
    """Raises KeyError for a name that is not in `MODELS`."""
    folder.mkdir(parents=True, exist_ok=True)
    model_speed.write_model(folder, layers, MODELS[name])
