"""Model descriptions: a catalogue by name, and any Hugging Face `config.json` of a MoE model.

Owns: the spellings that model families use for the same thing. Must not know: hardware. Needs no
network: a name resolves to the catalogue, anything else to a path or the local Hugging Face cache.
Values follow the models' published `config.json` and transformers' configuration classes.
"""

import json
from pathlib import Path
from typing import Any

from vllm_expertplex.planner.model_catalogue import CATALOGUE
from vllm_expertplex.planner.models import GQA, LINEAR, MLA, Attention, ModelSpec

Config = dict[str, Any]


def load_model(name: str) -> ModelSpec:
    """Describe `name`: a catalogue name, a repository id of one, a directory or a `config.json`.

    Raises ValueError with the known names when it is none of these.
    """
    key = name.rstrip("/").split("/")[-1].lower()
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return from_config(json.loads(path.read_text()), name=path.parent.name, source=str(path))
    if key in CATALOGUE:
        return from_config(CATALOGUE[key], name=key, source="catalogue")
    cached = _cached_config(name)
    if cached is not None:
        return from_config(json.loads(cached.read_text()), name=key, source=str(cached))
    known = ", ".join(sorted(CATALOGUE))
    raise ValueError(
        f"model {name!r}: not in the catalogue, no such file or directory, and not in the local "
        f"Hugging Face cache; give the path of its config.json, or one of: {known}"
    )


def _cached_config(name: str) -> Path | None:
    """`config.json` of a repository that was downloaded before."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(name, "config.json")
    except ValueError:  # not a repository id
        return None
    return Path(found) if isinstance(found, str) else None


def from_config(config: Config, name: str, source: str = "") -> ModelSpec:
    """Build a `ModelSpec` from the contents of a Hugging Face `config.json`.

    Raises ValueError when the model has no routed experts or a needed value is missing.
    """
    quantization = config.get("quantization_config")
    text = {**config, **(config.get("text_config") or {})}
    quantization = text.get("quantization_config") or quantization or {}
    experts = _first(text, "n_routed_experts", "num_local_experts", "num_experts")
    if not experts:
        raise ValueError(
            f"model {name!r} has no routed experts in its config (looked for n_routed_experts, "
            "num_local_experts, num_experts); ExpertPlex plans MoE models only"
        )
    layers = _need(text, name, "num_hidden_layers", "num_layers")
    hidden = _need(text, name, "hidden_size")
    intermediate = _first(text, "moe_intermediate_size", "expert_ffn_hidden_size") or _need(
        text, name, "intermediate_size"
    )
    moe_layers = _moe_layers(text, layers)
    shared = _first(text, "shared_expert_intermediate_size", "shared_intermediate_size") or 0
    shared = shared or intermediate * (_first(text, "n_shared_experts", "num_shared_experts") or 0)
    if text.get("model_type") in ("llama4", "llama4_text"):
        shared = intermediate
    expert_bytes, linear_bytes = _weight_bytes(quantization, text)
    return ModelSpec(
        name=name,
        hidden=hidden,
        vocab=_need(text, name, "vocab_size"),
        tied=bool(text.get("tie_word_embeddings", False)),
        attention=_attention(text, name, layers),
        moe_layers=moe_layers,
        dense_layers=layers - moe_layers,
        dense_intermediate=_first(text, "intermediate_size_mlp", "dense_intermediate_size")
        or text.get("intermediate_size", 0),
        experts=experts,
        top_k=_need(
            text, name, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k"
        ),
        expert_intermediate=intermediate,
        shared_intermediate=shared,
        mtp_layers=int(text.get("num_nextn_predict_layers") or 0),
        expert_bytes=expert_bytes,
        linear_bytes=linear_bytes,
        source=source,
    )


def _first(config: Config, *names: str) -> int:
    return next((int(config[n]) for n in names if config.get(n)), 0)


def _need(config: Config, model: str, *names: str) -> int:
    value = _first(config, *names)
    if not value:
        raise ValueError(f"model {model!r}: its config has none of {', '.join(names)}")
    return value


def _moe_layers(text: Config, layers: int) -> int:
    kinds = text.get("mlp_layer_types")
    if kinds:
        return sum(k != "dense" for k in kinds[:layers])
    if isinstance(text.get("moe_layers"), list):
        return len(text["moe_layers"])
    if isinstance(text.get("moe_layer_freq"), list):
        return sum(bool(x) for x in text["moe_layer_freq"][:layers])
    step = _first(text, "decoder_sparse_step", "interleave_moe_layer_step") or 1
    first = int(text.get("first_k_dense_replace") or 0)
    dense = set(text.get("mlp_only_layers") or [])
    return sum(i >= first and i not in dense and (i + 1) % step == 0 for i in range(layers))


def _attention(text: Config, name: str, layers: int) -> tuple[Attention, ...]:
    """Group the layers by attention kind, in the order they first appear."""
    kinds = text.get("layer_types") or ["full_attention"] * layers
    counts: dict[str, int] = {}
    for kind in kinds[:layers]:
        counts[kind] = counts.get(kind, 0) + 1
    return tuple(_attention_kind(text, name, kind, count) for kind, count in counts.items())


def _attention_kind(text: Config, name: str, kind: str, count: int) -> Attention:
    heads = _need(text, name, "num_attention_heads")
    index: dict[str, Any] = {
        "index_topk": _first(text, "index_topk"),
        "index_heads": _first(text, "index_n_heads"),
        "index_dim": _first(text, "index_head_dim"),
    }
    if not index["index_topk"]:
        index = {}
    if kind == "linear_attention" and text.get("linear_num_value_heads"):
        return Attention(
            layers=count,
            kind=LINEAR,
            heads=text["linear_num_value_heads"],
            kv_heads=text["linear_num_key_heads"],
            head_dim=text.get("linear_value_head_dim", 128),
        )
    if "compressed" in kind:  # DeepSeek-V4: one shared KV head, entries merged beside a window
        ratio = 4 if "sparse" in kind else 128
        return Attention(
            layers=count,
            heads=heads,
            kv_heads=1,
            head_dim=text["head_dim"],
            shared_kv=True,
            q_lora=_first(text, "q_lora_rank"),
            o_lora=_first(text, "o_lora_rank"),
            window=_first(text, "sliding_window"),
            compression=ratio,
            **(index if ratio == 4 else {}),
        )
    if text.get("kv_lora_rank"):
        return Attention(
            layers=count,
            kind=MLA,
            heads=heads,
            q_lora=_first(text, "q_lora_rank"),
            kv_lora=text["kv_lora_rank"],
            rope_dim=_first(text, "qk_rope_head_dim"),
            nope_dim=_first(text, "qk_nope_head_dim"),
            v_dim=_first(text, "v_head_dim"),
            **index,
        )
    window = 0
    if kind == "sliding_attention":
        window = _first(text, "sliding_window")
    elif kind == "chunked_attention":
        window = _first(text, "attention_chunk_size")
    return Attention(
        layers=count,
        kind=GQA,
        heads=heads,
        kv_heads=_first(text, "num_key_value_heads") or heads,
        head_dim=_first(text, "head_dim") or _need(text, name, "hidden_size") // heads,
        window=window,
        gated=bool(text.get("attn_output_gate")),
    )


def _weight_bytes(quantization: Config, text: Config) -> tuple[float, float]:
    """Bytes per parameter of routed experts and of the other linear layers."""
    plain = 4.0 if text.get("torch_dtype", text.get("dtype")) == "float32" else 2.0
    method = str(quantization.get("quant_method", "")).lower()
    if not method:
        return plain, plain
    if method == "mxfp4":  # gpt-oss: experts only
        return 0.5 + 1 / 32, plain
    if text.get("expert_dtype") == "fp4":  # DeepSeek-V4: FP4 experts, the rest FP8
        return 0.5 + 1 / 32, 1.0 + 4 / 128**2
    if method in ("fp8", "modelopt") and "fp4" not in str(quantization).lower():
        block = quantization.get("weight_block_size") or [1 << 30, 1]
        per = 1.0 + 4.0 / (block[0] * block[1])
        return per, per
    if "fp4" in str(quantization).lower():
        return 0.5 + 1 / 16, plain
    bits, group = _integer_weights(quantization)
    return bits / 8 + 2.0 / group, plain if method == "compressed-tensors" else bits / 8 + 2 / group


def _integer_weights(quantization: Config) -> tuple[int, int]:
    """Bits and group size of AWQ, GPTQ or compressed-tensors weights."""
    groups = quantization.get("config_groups") or {}
    for group in groups.values():
        weights = group.get("weights") or {}
        if weights.get("num_bits"):
            return int(weights["num_bits"]), int(weights.get("group_size") or 1 << 30)
    bits = int(quantization.get("bits") or quantization.get("w_bit") or 0)
    if not bits:
        raise ValueError(
            f"quantization {quantization.get('quant_method')!r}: cannot tell bytes per weight; "
            "known are fp8, mxfp4, nvfp4 (modelopt), awq, gptq and compressed-tensors"
        )
    return bits, int(quantization.get("group_size") or 128)
