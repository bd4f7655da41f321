"""Model descriptions against what their makers publish."""

import json

import pytest

from vllm_expertplex.planner.model_catalogue import CATALOGUE
from vllm_expertplex.planner.model_configs import from_config, load_model
from vllm_expertplex.planner.models import Attention


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [("minimax-m2.7", 230), ("glm-5.1-fp8", 756), ("kimi-k2-thinking", 594), ("gpt-oss-120b", 65)],
)
def test_checkpoint_sizes_are_the_published_ones(name: str, gigabytes: float) -> None:
    assert load_model(name).checkpoint_bytes / 1e9 == pytest.approx(gigabytes, rel=0.01)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("deepseek-v3", 671), ("qwen3-235b-a22b", 235.1), ("qwen3-30b-a3b", 30.5),
        ("qwen3-coder-480b-a35b-instruct", 480), ("qwen3-next-80b-a3b-instruct", 80),
        ("gpt-oss-120b", 116.8), ("gpt-oss-20b", 20.9), ("glm-4.5-air", 106),
        ("mixtral-8x7b-instruct-v0.1", 46.7), ("mixtral-8x22b-instruct-v0.1", 140.6),
        ("llama-4-scout-17b-16e-instruct", 108), ("llama-4-maverick-17b-128e-instruct", 400),
        ("olmoe-1b-7b-0924", 6.9), ("deepseek-v4-flash", 284), ("kimi-k2-instruct", 1026),
    ],
)  # fmt: skip
def test_parameter_counts_are_the_published_ones(name: str, billions: float) -> None:
    assert load_model(name).parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_the_papers_active_parameters() -> None:
    assert load_model("minimax-m2.7").active_routed_parameters == pytest.approx(7.0e9, rel=0.01)
    assert load_model("glm-5.1-fp8").active_routed_parameters == pytest.approx(22.6e9, rel=0.01)


def test_kv_bytes_per_token() -> None:
    assert load_model("minimax-m2.7").kv_bytes_per_token == 62 * 2 * 8 * 128 * 2
    deepseek = load_model("deepseek-v3")
    assert deepseek.kv_bytes_per_token == 61 * (512 + 64) * 2
    assert deepseek.kv_share(8) == 1.0  # latent KV is replicated, not split
    assert load_model("minimax-m2.7").kv_share(4) == 0.25


def test_windowed_layers_add_no_bytes_per_token_but_hold_a_window() -> None:
    model = load_model("gpt-oss-120b")
    full = 18 * 2 * 8 * 64 * 2
    assert model.kv_bytes_per_token == full
    assert model.kv_bytes_per_request == full * 128


def test_sparse_attention_reads_at_most_its_top_k() -> None:
    dense = Attention(layers=1, kind="mla", heads=8, kv_lora=512, rope_dim=64)
    sparse = Attention(
        layers=1, kind="mla", heads=8, kv_lora=512, rope_dim=64,
        index_topk=2048, index_heads=4, index_dim=128,
    )  # fmt: skip
    keys = (128 + 4) * 100_000
    assert sparse.read_bytes(100_000, 2.0) == 576 * 2 * 2048 + keys
    assert dense.read_bytes(100_000, 2.0) == 576 * 2 * 100_000


def test_reads_a_directory_and_a_file(tmp_path) -> None:
    config = {**CATALOGUE["olmoe-1b-7b-0924"], "quantization_config": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    by_directory = load_model(str(tmp_path))
    assert by_directory.parameters == load_model("olmoe-1b-7b-0924").parameters
    assert load_model(str(tmp_path / "config.json")).experts == 64


def test_reads_nested_text_configs() -> None:
    nested = {"model_type": "kimi_k25", "text_config": CATALOGUE["deepseek-v3"]}
    assert from_config(nested, "x").parameters == load_model("deepseek-v3").parameters


def test_a_dense_model_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no routed experts"):
        from_config({"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 10}, "dense")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"minimax-m2\.7"):
        load_model("no-such-model")


def test_a_directory_without_a_config_is_told_from_a_wrong_name(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"a directory without config\.json"):
        load_model(str(tmp_path))


def test_an_unknown_quantisation_is_refused() -> None:
    config = {**CATALOGUE["olmoe-1b-7b-0924"], "quantization_config": {"quant_method": "odd"}}
    with pytest.raises(ValueError, match="bytes per weight"):
        from_config(config, "x")


_PLAIN = {
    "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8,
    "num_experts_per_tok": 2,
}  # fmt: skip
_MLA = CATALOGUE["deepseek-v3"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 of 8 experts"),
        ({"num_local_experts": -8}, "num_local_experts"),
        ({"num_local_experts": 8.5}, "num_local_experts"),
        ({"num_local_experts": "eight"}, "num_local_experts"),
        ({"num_local_experts": [8]}, "num_local_experts"),
        ({"num_local_experts": 10**6}, "num_local_experts"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": -2}, "num_hidden_layers"),
        ({"hidden_size": float("nan")}, "hidden_size"),
        ({"hidden_size": float("inf")}, "hidden_size"),
        ({"hidden_size": 10**400}, "hidden_size"),
        ({"num_attention_heads": 100}, "hidden_size 64 over 100 heads"),
        ({"mlp_only_layers": [0, 1]}, "no MoE layer"),
        ({"first_k_dense_replace": 5}, "no MoE layer"),
        ({"mlp_layer_types": ["dense", "dense"]}, "no MoE layer"),
        ({"mlp_layer_types": ["sparse"]}, "mlp_layer_types"),
        ({"mlp_layer_types": "sparse"}, "mlp_layer_types"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({"layer_types": ["mamba", "full_attention"]}, "'mamba'"),
        ({"layer_types": ["linear_attention"] * 2}, "linear_num_value_heads"),
        ({"layer_types": ["compressed_attention"] * 2}, "head_dim"),
        ({"attn_layer_period": 8}, "attn_layer_period"),
        ({"hybrid_override_pattern": "MEM*"}, "hybrid_override_pattern"),
        ({"quantization_config": "fp8"}, "quantization_config"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 0]}}, "block"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}}, "block"),
        ({"quantization_config": {"quant_method": "gptq", "bits": -4}}, "bits"),
        ({"quantization_config": {"quant_method": "x", "config_groups": [1]}}, "config_groups"),
        ({"text_config": [1]}, "text_config"),
        ({"num_nextn_predict_layers": "x"}, "num_nextn_predict_layers"),
        ({**_MLA, "kv_lora_rank": -512}, "kv_lora_rank"),
        ({**_MLA, "kv_lora_rank": "512"}, "kv_lora_rank"),
        ({**_MLA, "qk_nope_head_dim": None}, "qk_nope_head_dim"),
        ({**_MLA, "v_head_dim": None}, "v_head_dim"),
    ],
)  # fmt: skip
def test_a_config_that_cannot_be_is_refused_by_name(changes, expected: str) -> None:
    with pytest.raises(ValueError, match="model 'odd'") as refused:
        from_config({**_PLAIN, **changes}, "odd")
    assert expected in str(refused.value)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "null", '"x"', b"\xff\xfe\x00"], ids=lambda text: repr(text)
)
def test_a_file_that_is_no_config_is_named(text, tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=str(path)):
        load_model(str(path))


def test_weights_scaled_by_channel_have_no_groups() -> None:
    """AWQ and GPTQ write group_size -1 for it."""
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": -1}
    model = from_config({**_PLAIN, "quantization_config": quantization}, "x")
    assert model.expert_bytes == pytest.approx(0.5, abs=1e-6)


def test_layers_of_linear_attention_are_counted_from_their_interval() -> None:
    """Qwen3-Next's published config.json has no list of layer types."""
    listed = CATALOGUE["qwen3-next-80b-a3b-instruct"]
    published = {k: v for k, v in listed.items() if k != "layer_types"}
    model = from_config({**published, "full_attention_interval": 4}, "x")
    assert model == from_config(listed, "x")


def test_moe_layers_beyond_the_last_layer_are_not_counted() -> None:
    model = from_config({**_PLAIN, "moe_layers": [1, 2, 3]}, "x")
    assert (model.moe_layers, model.dense_layers) == (1, 1)


def test_sparse_attention_may_be_named_layer_by_layer() -> None:
    """transformers writes `layer_types` into the configuration of models that had none."""
    published = CATALOGUE["glm-5.1"]
    named = published | {"layer_types": ["indexed_attention"] * published["num_hidden_layers"]}
    assert from_config(named, name="glm").attention == from_config(published, name="glm").attention
