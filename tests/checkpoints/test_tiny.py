"""Tiny checkpoints: reproducible, and random in a way that tests of routing can use."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from vllm_expertplex.checkpoints.tiny import ARCHITECTURES, DTYPES, make_tiny, tiny_model

_TEXT = "class Scheduler:\n    def schedule(self) -> SchedulerOutput:\n        return self.running"


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp(request.param)
    make_tiny(out, request.param)
    return out


def test_same_seed_gives_the_same_bytes(checkpoint: Path, tmp_path: Path) -> None:
    architecture = json.loads((checkpoint / "config.json").read_text())["model_type"]
    make_tiny(tmp_path, architecture.replace("_", "-"))
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / name).read_bytes() == (checkpoint / name).read_bytes(), name


def test_tokenizer_round_trips_text_and_every_id_decodes(checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    vocabulary = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    text = _TEXT + " é漢字🙂"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == vocabulary
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|user|>hello<|assistant|>"


def test_experts_are_stored_one_by_one(checkpoint: Path) -> None:
    """Loaders of single experts need one tensor per expert and projection, as on the hub."""
    names = [name for name in load_file(checkpoint / "model.safetensors") if ".experts." in name]
    layers = {name.split(".experts.")[0] for name in names}
    assert len(names) == len(layers) * 16 * 3


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_output_is_varied_and_routing_differs_between_tokens(architecture: str) -> None:
    model = tiny_model(architecture, torch.float32).eval()
    chosen: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(
                lambda gate, args, _: chosen.append(
                    (args[0].flatten(0, -2) @ gate.weight.T).topk(4).indices.sort().values
                )
            )
    with torch.inference_mode():
        logits = model(torch.arange(100, 164)[None]).logits[0]
    assert len(set(logits.argmax(dim=1).tolist())) > 32  # of 64 positions
    assert len({tuple(row.tolist()) for row in chosen[0]}) > 32


def test_fp32_rounds_to_bf16() -> None:
    full = tiny_model("qwen3-moe", DTYPES["fp32"]).state_dict()
    half = tiny_model("qwen3-moe", DTYPES["bf16"]).state_dict()
    assert all(torch.equal(full[name].bfloat16(), half[name]) for name in full)


def test_unknown_architecture_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'gpt-2'.*minimax-m2.*deepseek-v3"):
        tiny_model("gpt-2", torch.float32)
