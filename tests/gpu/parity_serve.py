"""How near `--executor expertplex` on GPUs comes to exact answers, beside plain vLLM.

    python tests/gpu/parity_serve.py [MODEL ...] [--logs FOLDER] [--json FILE]

Two kernels that round differently choose different tokens wherever two are nearly equal, and then
texts part. So each server's own tokens are judged: how far are the log-probabilities it reports
from those of the same model in fp32? Plain vLLM's error is the noise floor, and so is how far it is
from itself when the same prompts are batched differently. All servers start side by side.
MODEL+tbo is MODEL with every prefill step of ours cut into two microbatches; MODEL+tp is MODEL with
attention over two GPUs, plain vLLM's too; MODEL+compile has both under torch.compile, as vLLM has
them by default; MODEL+kvfp8 has KV caches in FP8 in both.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from _report import Row
from e2e.models import baseline, checkpoint
from e2e.server import Server, serve, start
from parity_report import report

TBO, TP, COMPILE, KV_FP8 = "tbo", "tp", "compile", "kvfp8"
MODELS = (
    *("minimax-m2", "minimax-m2-fp8", "qwen3-moe", "deepseek-v3", "glm-moe-dsa"),
    *(f"minimax-m2+{TBO}", f"deepseek-v3+{TBO}", f"minimax-m2+{COMPILE}", f"minimax-m2+{KV_FP8}"),
)
PROMPTS = (
    "Hello there, how",
    "def fibonacci(n):",
    "The quick brown fox",
    "In the year 2031, the",
    "import numpy as np\n",
    "Once upon a time in a small",
    "SELECT * FROM users WHERE",
    "a b c d e f g " * 90,  # several chunks of prefill
)
TOKENS = 16
START_DEADLINE_S = 240.0
# Decode replays whole steps, remote layers included.
GRAPHS = (
    *("--no-enforce-eager", "--compilation-config"),
    '{"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY","cudagraph_capture_sizes":[1,2,4,8]}',
)
COMPILED = (*GRAPHS[:2], '{"cudagraph_capture_sizes":[1,2,4,8]}')
# Small enough for all of them on one GPU. Ours is divided between the servers of a GPU.
OURS = ("--gpu-memory-utilization", "0.12")
PLAIN = ("--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", "1000000000")


class Answer(NamedTuple):
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


class Answers(NamedTuple):
    """Of the same prompts, one after the other, and all at once."""

    alone: list[Answer]
    together: list[Answer]

    @property
    def all(self) -> list[Answer]:
        return self.alone + self.together


class Parity(NamedTuple):
    """Distances in nats, medians over tokens, of all prompts and of the one where it is largest.
    `apart`: ours from plain's, and plain's from itself in other batches, for as long as texts are
    the same. `stable`: prompts that plain vLLM answers alike in every batch, of PROMPTS; `same`:
    those of them that we answer alike, too.
    """

    model: str
    tokens: int
    plain: float
    ours: float
    plain_worst: float
    ours_worst: float
    apart: float
    floor: float
    stable: int
    same: int
    start_s: float

    def __str__(self) -> str:
        return (
            f"{self.model}: from fp32, plain {self.plain:.4f}, ours {self.ours:.4f} nats (worst "
            f"prompt {self.plain_worst:.4f} and {self.ours_worst:.4f}); apart {self.apart:.4f}, "
            f"plain from itself {self.floor:.4f}; of {self.stable} prompts that plain answers "
            f"alike in every batch, ours are the same for {self.same}; started in "
            f"{self.start_s:.0f} s"
        )


def ask(server: Server, prompt: list[int]) -> Answer:
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "logprobs": 0}
    response = server.post("/v1/completions", {**body, "return_token_ids": True})
    assert response.is_success, response.text
    choice = response.json()["choices"][0]
    return Answer(prompt, choice["token_ids"], choice["logprobs"]["token_logprobs"])


def ask_all(server: Server, prompts: Sequence[list[int]]) -> Answers:
    with ThreadPoolExecutor(len(prompts)) as pool:
        alone = [ask(server, p) for p in prompts]
        return Answers(alone, list(pool.map(lambda p: ask(server, p), prompts)))


def errors(answer: Answer, reference: torch.nn.Module) -> list[float]:
    """Distances of the reported log-probabilities from the reference's, in nats."""
    prompt, tokens, logprobs = answer
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + tokens])).logits[0]
    expected = logits[len(prompt) - 1 : -1].log_softmax(-1)
    return [
        abs(float(row[token]) - logprob)
        for row, token, logprob in zip(expected, tokens, logprobs, strict=True)
    ]


def apart(one: Sequence[Answer], other: Sequence[Answer]) -> float:
    """Median distance of two servers' log-probabilities, as long as their texts are the same."""
    differences = []
    for a, b in zip(one, other, strict=True):
        for s, t, x, y in zip(a.tokens, b.tokens, a.logprobs, b.logprobs, strict=True):
            if s != t:
                break
            differences.append(abs(x - y))
    return statistics.median(differences) if differences else float("nan")


def check_cut(log: Path, steps: int) -> None:
    """Raises where fewer than `steps` steps ran as two microbatches, by vLLM's own word."""
    found = log.read_text(errors="replace").count("should_ubatch: True")
    if found < steps:
        raise AssertionError(f"{found} steps ran as two microbatches, expected {steps}; see {log}")


def measure(model: str, logs: Path) -> Parity:
    """Serve the model plainly and with one server of each kind, and compare their answers."""
    name, *how = model.split("+")
    cut = TBO in how
    options = (
        *(COMPILED if COMPILE in how else GRAPHS),
        *("--tensor-parallel-size", "2" if TP in how else "1"),
        *("--kv-cache-dtype", "fp8" if KV_FP8 in how else "auto"),
    )
    path, our_log = checkpoint(name), logs / f"{model}-ours.log"
    tokenizer = AutoTokenizer.from_pretrained(path)
    prompts = [tokenizer(p).input_ids for p in PROMPTS]
    config = logs / f"{model}.toml"
    config.write_text("tbo_tokens = 2\n" if cut else "")
    with (
        start(path, logs / f"{model}-plain.log", options=(*options, *PLAIN)) as server,
        serve(
            path,
            our_log,
            layout="1P1D1E",
            options=(*options, *OURS, "--expertplex-config", str(config)),
            environment={"VLLM_LOGGING_LEVEL": "DEBUG"} if cut else {},  # tells what is cut
            start_deadline_s=START_DEADLINE_S,
        ) as our_server,
    ):
        server.wait_healthy(START_DEADLINE_S)
        plain, ours = ask_all(server, prompts), ask_all(our_server, prompts)
        start_s = our_server.start_s
    if cut:
        check_cut(our_log, len(prompts))
    reference = AutoModelForCausalLM.from_pretrained(baseline(name), dtype=torch.float32).eval()
    exact = [[errors(answer, reference) for answer in x.all] for x in (plain, ours)]
    triples = list(zip(plain.alone, plain.together, ours.alone, strict=True))
    stable = [(p, o) for p, again, o in triples if p.tokens == again.tokens]
    return Parity(
        model,
        sum(map(len, exact[1])),
        *(statistics.median(chain.from_iterable(x)) for x in exact),
        *(max(map(statistics.median, x)) for x in exact),
        apart(plain.all, ours.all),
        apart(plain.alone, plain.together),
        len(stable),
        sum(p.tokens == o.tokens for p, o in stable),
        start_s,
    )


def judge(model: str, logs: Path) -> list[Row]:
    found = measure(model, logs)
    print(found, flush=True)
    name = f"{model}: median distance"
    return [
        Row(f"{name} from fp32", "nats", found.ours, found.plain, "plain vLLM", None),
        Row(f"{name} from plain vLLM", "nats", found.apart, found.floor, "from itself", None),
        Row(f"{model}: prompts", "same text", found.same, found.stable, "stable", None),
    ]


if __name__ == "__main__":
    report("gpu_parity", __doc__, MODELS, judge)
