"""The expert store: MoE servers together hold exactly the checkpoint's experts."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs

from vllm_expertplex.layout import ExpertMap
from vllm_expertplex.moe_server.backend import ExpertWeights
from vllm_expertplex.moe_server.store import _refuse_unsupported, load_experts

EXPERTS = 16
Tiny = Callable[[str], Path]


def configuration(model: Path) -> VllmConfig:
    args = EngineArgs(model=str(model), enforce_eager=True, max_model_len=64, load_format="auto")
    return args.create_engine_config()


@pytest.fixture(scope="module", autouse=True)
def _process_groups(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny) -> Iterator[None]:
    """vLLM's model classes ask for process groups; these have only this process in them."""
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )

    store = tmp_path_factory.mktemp("groups") / "store"
    with set_current_vllm_config(configuration(tiny("qwen3-moe"))):
        init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    yield
    cleanup_dist_env_and_memory()


# Names of an expert's gate, up and down in checkpoints.
NAMES = {
    "minimax-m2": ("w1", "w3", "w2"),
    "qwen3-moe": ("gate_proj", "up_proj", "down_proj"),
    "qwen2-moe": ("gate_proj", "up_proj", "down_proj"),
    "deepseek-v3": ("gate_proj", "up_proj", "down_proj"),
}


class Stored:
    """What a checkpoint file holds of its experts, by layer, expert and name."""

    def __init__(self, model: Path, architecture: str) -> None:
        self._tensors: dict[tuple[int, int, str], torch.Tensor] = {}
        for name, tensor in load_file(model / "model.safetensors").items():
            if match := re.search(r"layers\.(\d+)\..*\.experts\.(\d+)\.(\w+)\.(\w+)$", name):
                layer, expert, part, kind = match.groups()
                self._tensors[int(layer), int(expert), f"{part}.{kind}"] = tensor
        self.layers = sorted({layer for layer, _, _ in self._tensors})
        self._gate, self._up, self._down = NAMES[architecture]

    def expert(self, layer: int, expert: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        """w13, gate rows first, and w2."""
        gate, up, down = (
            self._tensors[layer, expert, f"{part}.{kind}"]
            for part in (self._gate, self._up, self._down)
        )
        return torch.cat([gate, up]), down


def layer_number(name: str) -> int:
    return int(re.search(r"layers\.(\d+)\.", name).group(1))  # type: ignore[union-attr]


def check_layer(stored: Stored, layer: int, weights: ExpertWeights, experts: list[int]) -> None:
    for slot, expert in enumerate(experts):
        w13, w2 = stored.expert(layer, expert, "weight")
        for found, expected in ((weights.w13[slot], w13), (weights.w2[slot], w2)):
            assert found.dtype == expected.dtype
            assert torch.equal(found.float(), expected.float())
        if weights.w13_scale is not None and weights.w2_scale is not None:
            s13, s2 = stored.expert(layer, expert, "weight_scale_inv")
            for found, expected in ((weights.w13_scale[slot], s13), (weights.w2_scale[slot], s2)):
                assert found.dtype == expected.dtype == torch.float32
                assert torch.equal(found, expected)


CASES = [("qwen3-moe", servers) for servers in (1, 2, 3, 5)]
CASES += [(name, 3) for name in ("minimax-m2", "qwen2-moe", "deepseek-v3", "minimax-m2-fp8")]


@pytest.mark.parametrize(("name", "servers"), CASES)
def test_servers_together_hold_the_checkpoints_experts(tiny: Tiny, name: str, servers: int) -> None:
    model = tiny(name)
    stored = Stored(model, name.removesuffix("-fp8"))
    placed = ExpertMap.contiguous(EXPERTS, servers)
    held = 0
    for rank in range(servers):
        local = placed.local_experts(rank)
        layers = load_experts(configuration(model), local)
        assert [layer_number(layer) for layer in layers] == stored.layers
        for layer, weights in layers.items():
            assert weights.w13.shape[0] == weights.w2.shape[0] == len(local)
            assert (weights.w13_scale is not None) == name.endswith("-fp8")
            check_layer(stored, layer_number(layer), weights, local)
        held += sum(weights.bytes for weights in layers.values())
    in_file = sum(t.numel() * t.element_size() for t in stored._tensors.values())
    assert held == in_file


def test_any_set_of_experts_can_be_held_in_any_order(tiny: Tiny) -> None:
    model = tiny("qwen3-moe")
    local = [11, 2, 7]
    for layer, weights in load_experts(configuration(model), local).items():
        check_layer(Stored(model, "qwen3-moe"), layer_number(layer), weights, local)


def without(source: Path, folder: Path, pattern: str) -> Path:
    """A copy of a checkpoint that lacks the tensors whose names match."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    kept = {name: t for name, t in tensors.items() if not re.search(pattern, name)}
    assert len(kept) < len(tensors)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("qwen3-moe", r"layers\.2\..*experts\.5\.up_proj"),
        ("minimax-m2-fp8", r"layers\.2\..*experts\.5\.w3\.weight_scale_inv"),
    ],
)
def test_a_missing_tensor_is_refused_with_its_layer(
    tiny: Tiny, tmp_path: Path, name: str, pattern: str
) -> None:
    model = without(tiny(name), tmp_path / "model", pattern)
    expected = 3 * 2 * (2 if name.endswith("-fp8") else 1)
    message = rf"has {expected - 1} of the {expected} expert tensors of \S*layers\.2\."
    with pytest.raises(ValueError, match=message):
        load_experts(configuration(model), [4, 5])
    load_experts(configuration(model), [3, 4])  # nothing of this server's is missing


def test_an_unknown_weight_format_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny("minimax-m2"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [64, 64],
    }
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"'fp8' \(weight_block_size \[64, 64\]\)"):
        load_experts(configuration(folder), [0])


@pytest.mark.parametrize(
    ("moe", "options", "named"),
    [
        ({"activation": "gelu"}, {}, "activation 'gelu'"),
        ({"has_bias": True}, {}, "biases"),
        ({}, {"apply_router_weight_on_input": True}, "router weights on the experts' input"),
        ({}, {"swiglu_limit": 7.0}, "swiglu limit"),
    ],
)
def test_what_experts_cannot_do_yet_is_refused_by_layer_and_name(
    moe: dict[str, Any], options: dict[str, Any], named: str
) -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    fields = {"activation": "silu", "has_bias": False} | moe
    fields["activation"] = MoEActivation(fields["activation"])
    config = SimpleNamespace(**fields)
    with pytest.raises(ValueError, match=rf"model\.layers\.0\.mlp: .*{named}"):
        _refuse_unsupported("model.layers.0.mlp", config, options)


def test_ordinary_experts_are_not_refused() -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    config = SimpleNamespace(activation=MoEActivation.SILU, has_bias=False)
    _refuse_unsupported("layer", config, {"apply_router_weight_on_input": False})


@pytest.mark.parametrize("name", ["qwen3-moe", "minimax-m2-fp8"])
def test_dummy_weights_need_no_checkpoint_and_act_like_trained_ones(
    name: str, tiny: Tiny, tmp_path: Path
) -> None:
    shutil.copy(tiny(name) / "config.json", tmp_path)
    args = EngineArgs(
        model=str(tmp_path), skip_tokenizer_init=True, enforce_eager=True, load_format="dummy"
    )
    layers = load_experts(args.create_engine_config(), [3, 5])
    assert len(layers) == 4
    for weights in layers.values():
        for weight, scale in ((weights.w13, weights.w13_scale), (weights.w2, weights.w2_scale)):
            values = weight.float() * (1 if scale is None else scale.flatten()[0])
            assert weight.shape[0] == 2
            assert (values[0] != values[1]).float().mean() > 0.9
            assert 0.8 < float(values.std()) * weight.shape[-1] ** 0.5 < 1.2
