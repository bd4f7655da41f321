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
from e2e.server import Server, serve

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
)
PLAIN = ("--kv-cache-memory-bytes", "2000000000")
# How much larger than plain vLLM's our error may be: both are means over 256 random tokens.
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


def error(answers: Sequence[Answer], reference: torch.nn.Module) -> float:
    """Mean distance of the reported log-probabilities from the reference's, in nats."""
    differences = []
    for prompt, tokens, logprobs in answers:
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + tokens])).logits[0]
        expected = logits[len(prompt) - 1 : -1].log_softmax(-1)
        for row, token, logprob in zip(expected, tokens, logprobs, strict=True):
            differences.append(abs(float(row[token]) - logprob))
    return statistics.mean(differences)


@pytest.mark.parametrize("name", ["minimax-m2", "minimax-m2-fp8", "qwen3-moe"])
def test_answers_are_as_near_to_exact_ones_as_plain_vllms(name: str, tmp_path: Path) -> None:
    model = checkpoint(name)
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [tokenizer(p).input_ids for p in PROMPTS]
    with serve(model, tmp_path / "plain.log", options=(*GRAPHS, *PLAIN)) as server:
        plain = ask_all(server, prompts)
    with serve(model, tmp_path / "ours.log", layout="1P1D1E", options=GRAPHS) as server:
        ours = ask_all(server, prompts)
    reference = AutoModelForCausalLM.from_pretrained(baseline(name), dtype=torch.float32).eval()
    errors = error(plain, reference), error(ours, reference)
    same = sum(a.tokens == b.tokens for a, b in zip(plain, ours, strict=True))
    print(f"{name}: error plain {errors[0]:.4f}, ours {errors[1]:.4f}; same text {same}/16")
    assert errors[1] < MOST_ERROR * errors[0] + 0.01
