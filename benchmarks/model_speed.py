"""How fast a deployment prefills and decodes a model of real dimensions, with random weights.

    python benchmarks/model_speed.py [--layers N] [--plain] [--json FILE]
    python benchmarks/model_speed.py --write FOLDER    (the model, for other benchmarks)

MiniMax-M2.7's dimensions (FP8 in 128x128 blocks, 256 experts, 8 per token) with as many of its 62
layers as the GPUs hold: times per layer are what to compare. Tokens are sampled at temperature 1,
so that requests stay different and spread over the experts. `--plain` measures vLLM itself (tensor
and expert parallel over the same GPUs) after ExpertPlex, in the same run.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch
from apk.common import report, row

from vllm_expertplex.checkpoints.tokenizer import train_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from e2e.server import MODEL_NAME, serve

PREFILL_TOKENS = 8192
DECODE_BATCHES = (1, 16, 64)
DECODE_TOKENS = (32, 160)
CONTEXT = 512
M27: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "vocab_size": 200064,
    "hidden_size": 3072,
    "head_dim": 128,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "intermediate_size": 1536,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 196608,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5e6,
        "partial_rotary_factor": 0.5,
    },
    "rotary_dim": 64,
    "rms_norm_eps": 1e-6,
    "scoring_func": "sigmoid",
    "use_routing_bias": False,  # a random one would send every token to the same experts
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "float8_e4m3fn",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    },
}
OPTIONS = (
    *("--load-format", "dummy", "--max-model-len", str(PREFILL_TOKENS + 256)),
    *("--max-num-batched-tokens", str(PREFILL_TOKENS), "--max-num-seqs", str(max(DECODE_BATCHES))),
    "--no-enable-prefix-caching",
    "--no-enforce-eager",
    "--compilation-config",
    json.dumps(
        {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": list(DECODE_BATCHES),
        }
    ),
)


def write_model(folder: Path, layers: int, model: dict[str, Any] = M27) -> None:
    (folder / "config.json").write_text(json.dumps(model | {"num_hidden_layers": layers}))
    train_tokenizer().save_pretrained(folder)
    # A model that was never trained samples any of its tokens: all need a text.
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    taken = {*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocabulary |= {f"unused{n}": n for n in range(model["vocab_size"]) if n not in taken}
    path.write_text(json.dumps(tokenizer))


def prompt(tokens: int) -> list[int]:
    return [random.randrange(2, 4000) for _ in range(tokens)]


def client(base_url: str) -> httpx.Client:
    limits = httpx.Limits(max_connections=None)
    return httpx.Client(base_url=base_url, timeout=120, trust_env=False, limits=limits)


def decode(base_url: str, batch: int, tokens: int) -> None:
    """Let `batch` requests decode `tokens` tokens each."""
    with client(base_url) as http:
        seconds(http, [prompt(CONTEXT) for _ in range(batch)], tokens)


def seconds(http: httpx.Client, prompts: list[list[int]], tokens: int) -> float:
    """Until all of `prompts`, sent at once, have been answered with `tokens` tokens each."""
    body = {"model": MODEL_NAME, "max_tokens": tokens, "temperature": 1, "ignore_eos": True}
    begin = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        for answer in pool.map(
            lambda p: http.post("/v1/completions", json=body | {"prompt": p}), prompts
        ):
            answer.raise_for_status()
    return time.perf_counter() - begin


def prefill_rate(http: httpx.Client, repeats: int, prompts: int = 8) -> float:
    """Tokens per second over `prompts` at once; the best of several times."""
    best = min(
        seconds(http, [prompt(PREFILL_TOKENS) for _ in range(prompts)], 1) for _ in range(repeats)
    )
    return prompts * PREFILL_TOKENS / best


def decode_ms(http: httpx.Client, batch: int, repeats: int = 2) -> float:
    """ms per token while `batch` requests decode: what more tokens take beyond few. Not streamed,
    so that neither HTTP server nor client is what is measured.
    """
    few, many = (
        min(seconds(http, [prompt(CONTEXT) for _ in range(batch)], n) for _ in range(repeats))
        for n in DECODE_TOKENS
    )
    return (many - few) * 1e3 / (DECODE_TOKENS[1] - DECODE_TOKENS[0])


def measure(base_url: str) -> dict[str, float]:
    """Everything once to warm up (kernels compile at first use), then for real."""
    found = {}
    with client(base_url) as http:
        prefill_rate(http, 1)
        for batch in DECODE_BATCHES:
            seconds(http, [prompt(CONTEXT) for _ in range(batch)], DECODE_TOKENS[0])
            found[f"decode, {batch} requests"] = decode_ms(http, batch)
            print(f"decode {batch}: {found[f'decode, {batch} requests']:.3f} ms", flush=True)
        found["prefill"] = prefill_rate(http, 3)
        print(f"prefill: {found['prefill']:.0f} tokens/s", flush=True)
    return found


def rows(
    layers: int, ours: dict[str, float], plain: dict[str, float] | None = None, name: str = ""
) -> list[dict]:
    """`plain`: what vLLM itself, called `name`, does. Per layer: everything in a step, head and
    sampling too, over the number of layers.
    """
    table, plain = [], plain or {}
    for what, value in ours.items():
        prefill = what == "prefill"
        unit = "tokens/s" if prefill else "ms/token"
        table.append(row(f"{what}, {layers} layers", unit, value, plain.get(what), name))
        scale = layers if prefill else 1e3 / layers
        peer = plain[what] * scale if what in plain else None
        unit = "tokens/s/layer" if prefill else "us/layer"
        table.append(row(f"{what}, per layer", unit, value * scale, peer, name))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=30, help="of the model's 62 (default 30)")
    parser.add_argument("--layout", default="1P1D1E")
    parser.add_argument("--plain", action="store_true", help="measure vLLM itself as well")
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--write", type=Path, help="only write configuration and tokenizer there")
    options = parser.parse_args()
    if options.write:
        options.write.mkdir(parents=True, exist_ok=True)
        write_model(options.write, options.layers)
        return
    gpus = torch.cuda.device_count()
    name = f"vLLM TP{gpus}+EP{gpus}"
    with tempfile.TemporaryDirectory() as scratch:
        logs = options.logs or Path(scratch)
        model = Path(scratch) / "model"
        model.mkdir()
        write_model(model, options.layers)
        with serve(model, logs / "ours.log", layout=options.layout, options=OPTIONS) as server:
            print(f"started in {server.start_s:.0f} s", flush=True)
            ours = measure(server.base_url)
        plain: dict[str, float] = {}
        if options.plain:
            parallel = ("--tensor-parallel-size", str(gpus), "--enable-expert-parallel")
            with serve(model, logs / "plain.log", options=(*OPTIONS, *parallel)) as server:
                print(f"{name} started in {server.start_s:.0f} s", flush=True)
                plain = measure(server.base_url)
    report("model-speed", rows(options.layers, ours, plain, name if plain else ""), options.json)


if __name__ == "__main__":
    main()
