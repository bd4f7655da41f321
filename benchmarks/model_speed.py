"""How fast a deployment prefills and decodes a model of real dimensions, with random weights.

    python benchmarks/model_speed.py [--layers N] [--plain] [--json FILE]

MiniMax-M2.7's dimensions (FP8 in 128x128 blocks, 256 experts, 8 per token) with as many of its 62
layers as the GPUs hold: times per layer are what to compare. Tokens are sampled at temperature 1,
so that requests stay different and spread over the experts. `--plain` measures vLLM itself (tensor
and expert parallel over the same GPUs) after ExpertPlex, in the same run.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from apk.common import report, row

from vllm_expertplex.checkpoints.tokenizer import train_tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from e2e.server import MODEL_NAME, Server, serve

PREFILL_TOKENS = 8192
DECODE_BATCHES = (1, 16, 64)
DECODE_TOKENS = 257
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
    "use_routing_bias": True,
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


def write_model(folder: Path, layers: int) -> None:
    (folder / "config.json").write_text(json.dumps(M27 | {"num_hidden_layers": layers}))
    train_tokenizer().save_pretrained(folder)
    # A model that was never trained samples any of its tokens: all need a text.
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    taken = {*vocabulary.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocabulary |= {f"unused{n}": n for n in range(M27["vocab_size"]) if n not in taken}
    path.write_text(json.dumps(tokenizer))


def prompt(tokens: int) -> list[int]:
    return [random.randrange(2, 4000) for _ in range(tokens)]


def prefill_rate(server: Server, prompts: int = 4, repeats: int = 4) -> float:
    """Tokens per second over `prompts` at once; the best of several times."""
    body = {"max_tokens": 1, "temperature": 1}

    def once() -> float:
        texts = [prompt(PREFILL_TOKENS) for _ in range(prompts)]
        begin = time.perf_counter()
        with ThreadPoolExecutor(prompts) as pool:
            for answer in pool.map(
                lambda p: server.post("/v1/completions", body | {"prompt": p}), texts
            ):
                answer.raise_for_status()
        return prompts * PREFILL_TOKENS / (time.perf_counter() - begin)

    return max(once() for _ in range(repeats))


def token_times(server: Server, text: list[int], count: int) -> list[float]:
    """When each event of a streamed answer came, s."""
    body = {"prompt": text, "max_tokens": count, "temperature": 1, "ignore_eos": True}
    times = []
    with server.http.stream(
        "POST", "/v1/completions", json={"model": MODEL_NAME, "stream": True, **body}
    ) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    return times


def decode_ms(server: Server, batch: int) -> float:
    """Median ms per token while all `batch` requests decode."""
    with ThreadPoolExecutor(batch) as pool:
        answers = list(
            pool.map(
                lambda p: token_times(server, p, DECODE_TOKENS),
                [prompt(CONTEXT) for _ in range(batch)],
            )
        )
    begin, end = max(t[0] for t in answers), min(t[-1] for t in answers)
    steps = [sum(begin <= t <= end for t in times) - 1 for times in answers]
    return (end - begin) * 1e3 / statistics.median(steps)


def measure(server: Server) -> dict[str, float]:
    """Everything once to warm up (kernels compile at first use), then for real."""
    prefill_rate(server, repeats=1)
    found = {}
    for batch in DECODE_BATCHES:
        decode_ms(server, batch)
        found[f"decode, {batch} requests"] = min(decode_ms(server, batch) for _ in range(2))
        print(f"decode {batch}: {found[f'decode, {batch} requests']:.3f} ms", flush=True)
    found["prefill"] = prefill_rate(server)
    print(f"prefill: {found['prefill']:.0f} tokens/s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=30, help="of the model's 62 (default 30)")
    parser.add_argument("--layout", default="1P1D1E")
    parser.add_argument("--plain", action="store_true", help="measure vLLM itself as well")
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    gpus = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as scratch:
        logs = options.logs or Path(scratch)
        model = Path(scratch) / "model"
        model.mkdir()
        write_model(model, options.layers)
        with serve(model, logs / "ours.log", layout=options.layout, options=OPTIONS) as server:
            print(f"started in {server.start_s:.0f} s", flush=True)
            ours = measure(server)
        plain: dict[str, float] = {}
        if options.plain:
            parallel = ("--tensor-parallel-size", str(gpus), "--enable-expert-parallel")
            with serve(model, logs / "plain.log", options=(*OPTIONS, *parallel)) as server:
                print(f"plain started in {server.start_s:.0f} s", flush=True)
                plain = measure(server)
    name = f"vLLM TP{gpus}+EP{gpus}" if plain else ""
    rows = []
    for what, value in ours.items():
        unit = "tokens/s" if what == "prefill" else "ms/token"
        rows.append(row(f"{what}, {options.layers} layers", unit, value, plain.get(what), name))
        per_layer = value * options.layers if what == "prefill" else value / options.layers * 1e3
        unit = "tokens/s/layer" if what == "prefill" else "us/layer"
        rows.append(row(f"{what}, per layer", unit, per_layer))
    report("model-speed", rows, options.json)


if __name__ == "__main__":
    main()
