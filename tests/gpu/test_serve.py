"""`vllm serve --executor expertplex` on GPUs answers as plain vLLM does, but for rounding.

Two kernels that round differently choose different tokens wherever two are nearly equal, and then
texts part. So each server's own tokens are judged: how far are the log-probabilities it reports
from those of the same model in fp32? Plain vLLM's error is the noise floor.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))
from e2e.models import baseline, checkpoint
from e2e.server import START_DEADLINE_S, Server, serve, start

pytestmark = [pytest.mark.gpu, pytest.mark.e2e, pytest.mark.slow]

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
TOKENS = 32
# Decode replays whole steps, remote layers included.
GRAPHS = (
    "--no-enforce-eager",
    "--compilation-config",
    '{"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY","cudagraph_capture_sizes":[1,2,4,8]}',
    *("--gpu-memory-utilization", "0.1"),  # both at once
)
PLAIN = ("--kv-cache-memory-bytes", "2000000000")
# How much larger than plain vLLM's our error may be: both are medians over 512 tokens. Means hang
# on the few tokens where a rounding changed the choice of an expert.
MOST_ERROR = 1.5


class Answer(NamedTuple):
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


def ask(server: Server, prompt: list[int]) -> Answer:
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "logprobs": 0}
    response = server.post("/v1/completions", {**body, "return_token_ids": True})
    assert response.is_success, response.text
    choice = response.json()["choices"][0]
    return Answer(prompt, choice["token_ids"], choice["logprobs"]["token_logprobs"])


def ask_all(server: Server, prompts: Sequence[list[int]]) -> list[Answer]:
    """One after the other, then all at once."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return [ask(server, p) for p in prompts] + list(pool.map(lambda p: ask(server, p), prompts))


def errors(answers: Sequence[Answer], reference: torch.nn.Module) -> list[float]:
    """Distances of the reported log-probabilities from the reference's, in nats."""
    differences = []
    for prompt, tokens, logprobs in answers:
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + tokens])).logits[0]
        expected = logits[len(prompt) - 1 : -1].log_softmax(-1)
        for row, token, logprob in zip(expected, tokens, logprobs, strict=True):
            differences.append(abs(float(row[token]) - logprob))
    return differences


def apart(one: Sequence[Answer], other: Sequence[Answer]) -> list[float]:
    """Distances of two servers' log-probabilities, for as long as their texts are the same."""
    differences = []
    for a, b in zip(one, other, strict=True):
        for s, t, x, y in zip(a.tokens, b.tokens, a.logprobs, b.logprobs, strict=True):
            if s != t:
                break
            differences.append(abs(x - y))
    return differences or [float("nan")]


@pytest.mark.parametrize("name", ["minimax-m2", "minimax-m2-fp8", "qwen3-moe"])
def test_answers_are_as_near_to_exact_ones_as_plain_vllms(name: str, tmp_path: Path) -> None:
    model = checkpoint(name)
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [tokenizer(p).input_ids for p in PROMPTS]
    with (
        start(model, tmp_path / "plain.log", options=(*GRAPHS, *PLAIN)) as server,
        serve(model, tmp_path / "ours.log", layout="1P1D1E", options=GRAPHS) as our_server,
    ):
        server.wait_healthy(START_DEADLINE_S)
        plain, ours = ask_all(server, prompts), ask_all(our_server, prompts)
    reference = AutoModelForCausalLM.from_pretrained(baseline(name), dtype=torch.float32).eval()
    found = {}
    for who, answers in (("plain", plain), ("ours", ours)):
        differences = errors(answers, reference)
        found[who] = statistics.median(differences)
        mean = statistics.mean(differences)
        print(f"{name}, {who}: median error {found[who]:.4f} nats, mean {mean:.4f}")
    same = sum(a.tokens == b.tokens for a, b in zip(plain, ours, strict=True))
    distances = apart(plain, ours)
    print(f"{name}: apart {statistics.median(distances):.4f} nats, mean", end=" ")
    print(f"{statistics.mean(distances):.4f}; same text {same}/{len(ours)}")
    assert found["ours"] < MOST_ERROR * found["plain"] + 0.01
