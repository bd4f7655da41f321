"""Model descriptions: a catalogue by name, and any Hugging Face `config.json` of a MoE model.

Owns: the spellings that model families use for the same thing. Must not know: hardware. Needs no
network: a name resolves to the catalogue, anything else to a path or the local Hugging Face cache.
Values follow the models' published `config.json` and transformers' configuration classes.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from vllm_expertplex.planner.files import read
from vllm_expertplex.planner.model_catalogue import CATALOGUE
from vllm_expertplex.planner.models import GQA, LINEAR, MLA, Attention, ModelSpec

Config = dict[str, Any]
LARGEST = 10_000_000  # of any size: what is larger is no size
PER_CHANNEL = 1 << 30  # weights that share a scale, where it is one for a whole channel
MOST_EXPERTS, MOST_LAYERS = 65_536, 10_000
# Jamba, MiniMax-Text-01, Nemotron-H, LFM2, Kimi-Linear: where attention stands among other layers.
_OTHER_LAYERS = (
    "attn_layer_period", "attn_type_list", "hybrid_override_pattern", "full_attn_idxs",
    "linear_attn_config",
)  # fmt: skip


def load_model(name: str, called: str | None = None) -> ModelSpec:
    """Describe `name`: a catalogue name, a repository id of one, a directory or a `config.json`.

    `called`: its name in plans and messages; else that of its directory. Raises ValueError with the
    known names when it is none of these.
    """
    key = name.rstrip("/").split("/")[-1].lower()
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        name = called or path.resolve().parent.name
        return from_config(_read(path), name=name, source=str(path))
    if key in CATALOGUE:
        return from_config(CATALOGUE[key], name=key, source="catalogue")
    cached = _cached_config(name)
    if cached is not None:
        return from_config(_read(cached), name=key, source=str(cached))
    folder = bool(name) and Path(name).expanduser().is_dir()
    found = "a directory without config.json" if folder else "no such file or directory"
    known = ", ".join(sorted(CATALOGUE))
    raise ValueError(
        f"model {name!r}: {found}, not in the catalogue, and not in the local Hugging Face cache; "
        f"give the path of its config.json, or one of: {known}"
    )


def _read(path: Path) -> Config:
    try:
        config = json.loads(read("model config", str(path)))
    except json.JSONDecodeError as error:
        raise ValueError(f"model config {path}: no JSON: {error}; give a config.json") from None
    if not isinstance(config, dict):
        raise ValueError(
            f"model config {path}: found a JSON {type(config).__name__}, expected an object, as in "
            "a config.json"
        )
    return config


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

    Raises ValueError, with the model's name, when it has no routed experts, a value is missing, or
    one cannot be.
    """
    try:
        return _from_config(config, name, source)
    except ValueError as error:
        raise ValueError(f"model {name!r}: {error}") from None


def _from_config(config: Config, name: str, source: str) -> ModelSpec:
    text = {**config, **_object(config, "text_config")}
    quantization = _object(text, "quantization_config")
    expert_names = ("n_routed_experts", "num_local_experts", "num_experts")
    experts = _first(text, *expert_names, most=MOST_EXPERTS)
    if not experts:
        raise ValueError(
            f"no routed experts in its config (looked for {', '.join(expert_names)}); ExpertPlex "
            "plans MoE models only"
        )
    top_k_names = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k")
    top_k = _need(text, *top_k_names)
    if top_k > experts:
        raise ValueError(f"{top_k_names[0]} {top_k} of {experts} experts; expected at most all")
    layers = _need(text, "num_hidden_layers", "num_layers", most=MOST_LAYERS)
    intermediate = _first(text, "moe_intermediate_size", "expert_ffn_hidden_size") or _need(
        text, "intermediate_size"
    )
    moe_layers = _moe_layers(text, layers)
    if not moe_layers:
        raise ValueError(
            f"no MoE layer among its {layers} layers; ExpertPlex plans MoE models only"
        )
    shared = _first(text, "shared_expert_intermediate_size", "shared_intermediate_size")
    shared = shared or intermediate * _first(text, "n_shared_experts", "num_shared_experts")
    if text.get("model_type") in ("llama4", "llama4_text"):
        shared = intermediate
    expert_bytes, linear_bytes = _weight_bytes(quantization, text)
    return ModelSpec(
        name=name,
        hidden=_need(text, "hidden_size"),
        vocab=_need(text, "vocab_size"),
        tied=bool(text.get("tie_word_embeddings", False)),
        attention=_attention(text, layers),
        moe_layers=moe_layers,
        dense_layers=layers - moe_layers,
        dense_intermediate=_first(
            text, "intermediate_size_mlp", "dense_intermediate_size", "intermediate_size"
        ),
        experts=experts,
        top_k=top_k,
        expert_intermediate=intermediate,
        shared_intermediate=shared,
        mtp_layers=_first(text, "num_nextn_predict_layers"),
        expert_bytes=expert_bytes,
        linear_bytes=linear_bytes,
        source=source,
    )


def _object(config: Config, name: str) -> Config:
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{name}: found {value!r}, expected an object")
    return value


def _list(config: Config, name: str, layers: int) -> list[Any]:
    """One entry for each of the model's layers, or nothing where the config has no such list."""
    value = config.get(name) or []
    if not isinstance(value, list) or 0 < len(value) < layers:
        raise ValueError(f"{name}: found {value!r:.80}, expected a list of {layers} layers")
    return value[:layers]


def _first(config: Config, *names: str, most: int = LARGEST) -> int:
    """The first of `names` that the config has a value for; 0 if none."""
    for name in names:
        value = config.get(name)
        if value:
            if not isinstance(value, int | float) or not 1 <= value <= most or value % 1:
                raise ValueError(
                    f"{name}: found {value!r:.40}, expected a whole number up to {most}"
                )
            return int(value)
    return 0


def _need(config: Config, *names: str, most: int = LARGEST) -> int:
    value = _first(config, *names, most=most)
    if not value:
        raise ValueError(f"its config has none of {', '.join(names)}")
    return value


def _moe_layers(text: Config, layers: int) -> int:
    kinds = _list(text, "mlp_layer_types", layers)
    if kinds:
        return sum(kind != "dense" for kind in kinds)
    if isinstance(text.get("moe_layers"), list):
        return sum(layer in text["moe_layers"] for layer in range(layers))
    if isinstance(text.get("moe_layer_freq"), list):
        return sum(bool(x) for x in _list(text, "moe_layer_freq", layers))
    step = _first(text, "decoder_sparse_step", "interleave_moe_layer_step") or 1
    first = _first(text, "first_k_dense_replace")
    dense = text.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ValueError(f"mlp_only_layers: found {dense!r}, expected a list of layers")
    return sum(i >= first and i not in dense and (i + 1) % step == 0 for i in range(layers))


def _attention(text: Config, layers: int) -> tuple[Attention, ...]:
    """Group the layers by attention kind, in the order they first appear."""
    other = next((field for field in _OTHER_LAYERS if text.get(field)), None)
    if other:
        raise ValueError(f"{other}: its layers are not all attention, and others are not modelled")
    # Qwen3-Next: every n-th layer; the list is its configuration class's, not its config.json's.
    interval = _first(text, "full_attention_interval") or 1
    kinds = _list(text, "layer_types", layers) or [
        "linear_attention" if (layer + 1) % interval else "full_attention"
        for layer in range(layers)
    ]
    return tuple(_attention_kind(text, str(kind), n) for kind, n in Counter(kinds).items())


def _attention_kind(text: Config, kind: str, count: int) -> Attention:
    heads = _need(text, "num_attention_heads")
    index: dict[str, Any] = {
        "index_topk": _first(text, "index_topk"),
        "index_heads": _first(text, "index_n_heads"),
        "index_dim": _first(text, "index_head_dim"),
    }
    if not index["index_topk"]:
        index = {}
    if kind == "linear_attention":
        return Attention(
            layers=count,
            kind=LINEAR,
            heads=_need(text, "linear_num_value_heads"),
            kv_heads=_need(text, "linear_num_key_heads"),
            head_dim=_first(text, "linear_value_head_dim") or 128,
        )
    if "compressed" in kind:  # DeepSeek-V4: one shared KV head, entries merged beside a window
        ratio = 4 if "sparse" in kind else 128
        return Attention(
            layers=count,
            heads=heads,
            kv_heads=1,
            head_dim=_need(text, "head_dim"),
            shared_kv=True,
            q_lora=_first(text, "q_lora_rank"),
            o_lora=_first(text, "o_lora_rank"),
            window=_first(text, "sliding_window"),
            compression=ratio,
            **(index if ratio == 4 else {}),
        )
    windows = {
        "full_attention": (),
        "attention": (),
        "indexed_attention": (),  # what it reads is in `index`
        "sliding_attention": ("sliding_window",),
        "chunked_attention": ("attention_chunk_size",),
    }
    if kind not in windows:
        raise ValueError(
            f"layer_types: found {kind!r}, expected linear_attention, compressed attention or one "
            f"of {', '.join(windows)}; other layers are not modelled"
        )
    if _first(text, "kv_lora_rank"):
        return Attention(
            layers=count,
            kind=MLA,
            heads=heads,
            q_lora=_first(text, "q_lora_rank"),
            kv_lora=_need(text, "kv_lora_rank"),
            rope_dim=_need(text, "qk_rope_head_dim"),
            nope_dim=_need(text, "qk_nope_head_dim"),
            v_dim=_need(text, "v_head_dim"),
            **index,
        )
    hidden = _need(text, "hidden_size")
    head_dim = _first(text, "head_dim") or hidden // heads
    if not head_dim:
        raise ValueError(f"hidden_size {hidden} over {heads} heads leaves none of them a width")
    return Attention(
        layers=count,
        kind=GQA,
        heads=heads,
        kv_heads=_first(text, "num_key_value_heads") or heads,
        head_dim=head_dim,
        window=_first(text, *windows[kind]),
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
        block = quantization.get("weight_block_size") or [PER_CHANNEL, 1]
        if not isinstance(block, list) or len(block) != 2 or not all(b > 0 for b in block):
            raise ValueError(f"weight_block_size: found {block!r}, expected two positive numbers")
        per = 1.0 + 4.0 / (block[0] * block[1])
        return per, per
    if "fp4" in str(quantization).lower():
        return 0.5 + 1 / 16, plain
    bits, group = _integer_weights(quantization)
    return bits / 8 + 2.0 / group, plain if method == "compressed-tensors" else bits / 8 + 2 / group


def _integer_weights(quantization: Config) -> tuple[int, int]:
    """Bits and group size of AWQ, GPTQ or compressed-tensors weights; -1 is one scale a channel."""
    weights = quantization
    for group in _object(quantization, "config_groups").values():
        if isinstance(group, dict) and _object(group, "weights").get("num_bits"):
            weights = _object(group, "weights")
            break
    bits = _first(weights, "num_bits", "bits", "w_bit", most=64)
    if not bits:
        raise ValueError(
            f"quantization {quantization.get('quant_method')!r}: cannot tell bytes per weight; "
            "known are fp8, mxfp4, nvfp4 (modelopt), awq, gptq and compressed-tensors"
        )
    if weights.get("group_size") == -1:
        return bits, PER_CHANNEL
    default = 128 if weights is quantization else PER_CHANNEL
    return bits, _first(weights, "group_size") or default
