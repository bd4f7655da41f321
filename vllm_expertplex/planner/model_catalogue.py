"""Published shapes of MoE models, as the part of their `config.json` that the planner reads.

Owns: data only. A value here is the models' own; `tests/planner/test_models.py` checks the sizes
that follow from them against the published ones.
"""

from typing import Any

_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_INT4 = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}},
}


def _c(**values: Any) -> dict[str, Any]:
    return values


_MINIMAX_M2 = _c(
    model_type="minimax_m2", num_hidden_layers=62, hidden_size=3072, intermediate_size=1536,
    num_local_experts=256, num_experts_per_tok=8, num_attention_heads=48, num_key_value_heads=8,
    head_dim=128, vocab_size=200064, quantization_config=_FP8,
)  # fmt: skip
_DEEPSEEK_V3 = _c(
    model_type="deepseek_v3", num_hidden_layers=61, hidden_size=7168, intermediate_size=18432,
    moe_intermediate_size=2048, n_routed_experts=256, num_experts_per_tok=8, n_shared_experts=1,
    first_k_dense_replace=3, num_attention_heads=128, q_lora_rank=1536, kv_lora_rank=512,
    qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, vocab_size=129280,
    num_nextn_predict_layers=1, quantization_config=_FP8,
)  # fmt: skip
_GLM_5 = _c(
    model_type="glm_moe_dsa", num_hidden_layers=78, hidden_size=6144, intermediate_size=12288,
    moe_intermediate_size=2048, n_routed_experts=256, num_experts_per_tok=8, n_shared_experts=1,
    first_k_dense_replace=3, num_attention_heads=64, q_lora_rank=2048, kv_lora_rank=512,
    qk_rope_head_dim=64, qk_nope_head_dim=192, v_head_dim=256, index_topk=2048, index_n_heads=32,
    index_head_dim=128, vocab_size=154880, num_nextn_predict_layers=1,
)  # fmt: skip
_KIMI_K2 = {
    **_DEEPSEEK_V3, "n_routed_experts": 384, "first_k_dense_replace": 1, "vocab_size": 163840,
    "num_attention_heads": 64, "num_nextn_predict_layers": 0,
}  # fmt: skip
_QWEN3_235B = _c(
    model_type="qwen3_moe", num_hidden_layers=94, hidden_size=4096, intermediate_size=12288,
    moe_intermediate_size=1536, num_experts=128, num_experts_per_tok=8, num_attention_heads=64,
    num_key_value_heads=4, head_dim=128, vocab_size=151936,
)  # fmt: skip
_QWEN3_30B = {
    **_QWEN3_235B, "num_hidden_layers": 48, "hidden_size": 2048, "moe_intermediate_size": 768,
    "num_attention_heads": 32,
}  # fmt: skip
_QWEN3_480B = {
    **_QWEN3_235B, "num_hidden_layers": 62, "hidden_size": 6144, "moe_intermediate_size": 2560,
    "num_experts": 160, "num_attention_heads": 96, "num_key_value_heads": 8,
}  # fmt: skip
_QWEN3_NEXT = _c(
    model_type="qwen3_next", num_hidden_layers=48, hidden_size=2048, moe_intermediate_size=512,
    num_experts=512, num_experts_per_tok=10, shared_expert_intermediate_size=512,
    num_attention_heads=16, num_key_value_heads=2, head_dim=256, linear_num_value_heads=32,
    linear_num_key_heads=16, linear_value_head_dim=128, attn_output_gate=True,
    layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 12,
    vocab_size=151936,
)  # fmt: skip
_GPT_OSS = _c(
    model_type="gpt_oss", num_hidden_layers=36, hidden_size=2880, intermediate_size=2880,
    num_local_experts=128, num_experts_per_tok=4, num_attention_heads=64, num_key_value_heads=8,
    head_dim=64, sliding_window=128, layer_types=["sliding_attention", "full_attention"] * 18,
    vocab_size=201088, quantization_config={"quant_method": "mxfp4"},
)  # fmt: skip
_GLM_45 = _c(
    model_type="glm4_moe", num_hidden_layers=92, hidden_size=5120, intermediate_size=12288,
    moe_intermediate_size=1536, n_routed_experts=160, num_experts_per_tok=8, n_shared_experts=1,
    first_k_dense_replace=3, num_attention_heads=96, num_key_value_heads=8, head_dim=128,
    vocab_size=151552, num_nextn_predict_layers=1,
)  # fmt: skip
_GLM_45_AIR = {
    **_GLM_45, "num_hidden_layers": 46, "hidden_size": 4096, "intermediate_size": 10944,
    "moe_intermediate_size": 1408, "n_routed_experts": 128, "first_k_dense_replace": 1,
}  # fmt: skip
_MIXTRAL = _c(
    model_type="mixtral", num_hidden_layers=32, hidden_size=4096, intermediate_size=14336,
    num_local_experts=8, num_experts_per_tok=2, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=32000,
)  # fmt: skip
_LLAMA4 = _c(
    model_type="llama4_text", num_hidden_layers=48, hidden_size=5120, intermediate_size=8192,
    intermediate_size_mlp=16384, num_local_experts=16, num_experts_per_tok=1,
    num_attention_heads=40, num_key_value_heads=8, head_dim=128, attention_chunk_size=8192,
    layer_types=(["chunked_attention"] * 3 + ["full_attention"]) * 12, vocab_size=202048,
)  # fmt: skip
_OLMOE = _c(
    model_type="olmoe", num_hidden_layers=16, hidden_size=2048, intermediate_size=1024,
    num_experts=64, num_experts_per_tok=8, num_attention_heads=16, num_key_value_heads=16,
    vocab_size=50304,
)  # fmt: skip
_DEEPSEEK_V4_FLASH = _c(
    model_type="deepseek_v4", num_hidden_layers=43, hidden_size=4096, moe_intermediate_size=2048,
    n_routed_experts=256, num_experts_per_tok=6, n_shared_experts=1, num_attention_heads=64,
    head_dim=512, q_lora_rank=1024, o_lora_rank=1024, index_topk=512, index_n_heads=64,
    index_head_dim=128, sliding_window=128, vocab_size=129280, expert_dtype="fp4",
    layer_types=["heavily_compressed_attention"] * 2
    + ["compressed_sparse_attention", "heavily_compressed_attention"] * 20
    + ["compressed_sparse_attention"],
    num_nextn_predict_layers=1, quantization_config=_FP8,
)  # fmt: skip

CATALOGUE: dict[str, dict[str, Any]] = {
    "minimax-m2": _MINIMAX_M2,
    "minimax-m2.1": _MINIMAX_M2,
    "minimax-m2.5": _MINIMAX_M2,
    "minimax-m2.7": _MINIMAX_M2,
    "glm-5-fp8": {**_GLM_5, "quantization_config": _FP8},
    "glm-5.1": _GLM_5,
    "glm-5.1-fp8": {**_GLM_5, "quantization_config": _FP8},
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-r1": _DEEPSEEK_V3,
    "deepseek-v3.1": _DEEPSEEK_V3,
    "deepseek-v3.2": {
        **_DEEPSEEK_V3, "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128,
    },
    "deepseek-v4-flash": _DEEPSEEK_V4_FLASH,
    "kimi-k2-instruct": {**_KIMI_K2, "quantization_config": _FP8},
    "kimi-k2-thinking": {**_KIMI_K2, "quantization_config": _INT4},
    "qwen3-30b-a3b": _QWEN3_30B,
    "qwen3-30b-a3b-fp8": {**_QWEN3_30B, "quantization_config": _FP8},
    "qwen3-235b-a22b": _QWEN3_235B,
    "qwen3-235b-a22b-fp8": {**_QWEN3_235B, "quantization_config": _FP8},
    "qwen3-coder-480b-a35b-instruct": _QWEN3_480B,
    "qwen3-coder-480b-a35b-instruct-fp8": {**_QWEN3_480B, "quantization_config": _FP8},
    "qwen3-next-80b-a3b-instruct": _QWEN3_NEXT,
    "gpt-oss-120b": _GPT_OSS,
    "gpt-oss-20b": {
        **_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
    "glm-4.5": _GLM_45,
    "glm-4.5-fp8": {**_GLM_45, "quantization_config": _FP8},
    "glm-4.6": _GLM_45,
    "glm-4.5-air": _GLM_45_AIR,
    "glm-4.5-air-fp8": {**_GLM_45_AIR, "quantization_config": _FP8},
    "mixtral-8x7b-instruct-v0.1": _MIXTRAL,
    "mixtral-8x22b-instruct-v0.1": {
        **_MIXTRAL, "num_hidden_layers": 56, "hidden_size": 6144, "intermediate_size": 16384,
        "num_attention_heads": 48, "vocab_size": 32768,
    },
    "llama-4-scout-17b-16e-instruct": _LLAMA4,
    "llama-4-maverick-17b-128e-instruct": {
        **_LLAMA4, "num_local_experts": 128, "interleave_moe_layer_step": 2,
    },
    "olmoe-1b-7b-0924": _OLMOE,
}  # fmt: skip
