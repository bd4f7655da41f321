"""How near `--executor asyncep` on GPUs comes to plain vLLM, which runs the same kernels.

    python tests/gpu/parity_asyncep.py [MODEL ...] [--logs FOLDER] [--json FILE]

All servers of a model start side by side: most of a start is not GPU work. With one GPU engines
share it, and gather from each other all the same.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from _report import Row
from e2e.models import checkpoint
from e2e.server import Server, start
from parity_report import report

MODELS = ("minimax-m2", "minimax-m2-fp8")
CONFIGS: tuple[dict[str, Any], ...] = (
    {"gpus": 1},
    {"gpus": 2},
    {"gpus": 1, "offload_layers": 1},
    {"gpus": 2, "offload_layers": 2},
    {"gpus": 2, "kv_free": True},
)
PROMPTS = tuple([7 + i, *range(100, 99 + n)] for i, n in enumerate((1, 17, 33, 500, 1400)))
TOP, TOKENS = 5, 8
START_DEADLINE_S = 200.0
_ROOM = (
    # Small enough for all of them on one GPU, and no profiling, which others would disturb.
    *("--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", "300000000"),
    *("--max-num-batched-tokens", "2048"),  # a prompt is one step, as without KV
)


class Answer(NamedTuple):
    """The tokens, and of the first its most probable ones with their log-probabilities."""

    tokens: list[int]
    top: dict[str, float]


class Answered(NamedTuple):
    """What one server answered, alone and together, and the state of its engines after that."""

    alone: list[Answer]
    together: list[Answer]
    engines: list[dict[str, Any]]


class Parity(NamedTuple):
    """Of one configuration against plain vLLM, in nats. One request at a time runs the same kernels
    on the same shapes (`alone`, the worst). Together, batches differ from server to server and so
    does rounding: a wrong expert moves log-probabilities by far more (`together`, the mean).
    `floor`: as `together`, plain from itself alone. `same`: texts of PROMPTS, asked alone.
    """

    config: dict[str, Any]
    alone: float
    together: float
    floor: float
    same: int
    engines: list[dict[str, Any]]

    @property
    def name(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.config.items())

    def __str__(self) -> str:
        return (
            f"{self.name}: alone at most {self.alone:.2g}, same text {self.same}/{len(PROMPTS)}; "
            f"of many at once {self.together:.2g} on average, plain from itself {self.floor:.2g}"
        )


def ask(server: Server, prompt: list[int], tokens: int) -> Answer:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": TOP}
    reply = server.post("/v1/completions", body | {"return_token_ids": True, "ignore_eos": True})
    assert reply.is_success, reply.text
    choice = reply.json()["choices"][0]
    return Answer(choice["token_ids"], choice["logprobs"]["top_logprobs"][0])


def _answers_of(server: Server, config: dict[str, Any]) -> Answered:
    """Each prompt alone, then many at once."""
    tokens = 1 if config.get("kv_free") else TOKENS
    alone = [ask(server, prompt, tokens) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(_MANY)) as pool:
        together = list(pool.map(lambda prompt: ask(server, prompt, tokens), _MANY))
    status = server.http.get("/expertplex/status")  # plain vLLM has none
    return Answered(alone, together, status.json()["servers"] if status.is_success else [])


_MANY = [prompt for prompt in PROMPTS for _ in range(4)]


def _start(model: Path, logs: Path, config: dict[str, Any]) -> Any:
    name = "-".join(f"{key}{value}" for key, value in config.items())
    file = logs / f"{name}.json"
    file.write_text(json.dumps(config))
    asyncep = ("--executor", "asyncep", "--asyncep-config", str(file))
    return start(model, logs / f"{name}.log", options=(*_ROOM, *asyncep))


def measure(model: str, logs: Path) -> list[Parity]:
    """Of CONFIGS. All servers are asked side by side too: each compiles kernels."""
    path = checkpoint(model)
    with ExitStack() as stack:
        environment = {"VLLM_USE_V2_MODEL_RUNNER": "0"}  # as ours
        log = logs / "plain.log"
        plain = stack.enter_context(start(path, log, options=_ROOM, environment=environment))
        ours = [stack.enter_context(_start(path, logs, config)) for config in CONFIGS]
        for server in (plain, *ours):
            server.wait_healthy(START_DEADLINE_S)
        with ThreadPoolExecutor() as pool:
            expected, *found = pool.map(_answers_of, (plain, *ours), ({}, *CONFIGS))
            list(pool.map(lambda server: server.stop(), ours))
        left = [file for server in ours for file in server.leftovers()]
        if left:
            raise RuntimeError(f"left behind after a normal stop: {left}")
    return [compare(expected, c, f) for c, f in zip(CONFIGS, found, strict=True)]


def compare(plain: Answered, config: dict[str, Any], ours: Answered) -> Parity:
    once = [answer for answer in plain.alone for _ in range(4)]
    return Parity(
        config,
        max(_differences(plain.alone, ours.alone)),
        statistics.mean(_differences(plain.together, ours.together)),
        statistics.mean(_differences(plain.together, once)),
        sum(
            o.tokens == p.tokens[: len(o.tokens)]
            for p, o in zip(plain.alone, ours.alone, strict=True)
        ),
        ours.engines,
    )


def _differences(ones: Sequence[Answer], others: Sequence[Answer]) -> list[float]:
    """Of the log-probabilities of tokens that both name."""
    return [
        abs(one.top[t] - other.top[t])
        for one, other in zip(ones, others, strict=True)
        for t in one.top.keys() & other.top.keys()
    ]


def judge(model: str, logs: Path) -> list[Row]:
    (logs / model).mkdir(parents=True, exist_ok=True)
    rows = []
    for parity in measure(model, logs / model):
        print(f"{model}, {parity}", flush=True)
        name, plain = f"{model}, {parity.name}", "plain vLLM from itself"
        rows += [
            Row(f"{name}: alone, worst", "nats", parity.alone, None, "", None),
            Row(f"{name}: together", "nats", parity.together, parity.floor, plain, None),
            Row(f"{name}: same text", "texts", parity.same, len(PROMPTS), "of", None),
        ]
    return rows


if __name__ == "__main__":
    report("gpu_parity_asyncep", __doc__, MODELS, judge)
