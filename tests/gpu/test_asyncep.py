"""`vllm serve --executor asyncep` on GPUs answers as plain vLLM does, from the same kernels.

All servers of a model start side by side: most of a start is not GPU work. Two GPUs are needed, and
some gigabytes of each.
"""

from __future__ import annotations

import json
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from e2e.models import checkpoint
from e2e.server import Server, start

pytestmark = [pytest.mark.gpu, pytest.mark.e2e, pytest.mark.slow]

CONFIGS: tuple[dict[str, Any], ...] = (
    {"gpus": 1},
    {"gpus": 2},
    {"gpus": 1, "offload_layers": 1},
    {"gpus": 2, "offload_layers": 2},
    {"gpus": 2, "kv_free": True},
)
PROMPTS = tuple([7 + i, *range(100, 99 + n)] for i, n in enumerate((1, 17, 33, 500, 1400)))
TOP, TOKENS = 5, 8
START_DEADLINE_S = 170.0
_ROOM = (
    # Small enough for all of them on two GPUs, and no profiling, which others would disturb.
    *("--gpu-memory-utilization", "0.4", "--kv-cache-memory-bytes", "1000000000"),
    *("--max-num-batched-tokens", "2048"),  # a prompt is one step, as without KV
)
# One request at a time runs the same kernels on the same shapes. Together, batches differ from
# server to server, and so does rounding: a wrong expert moves logprobs by far more.
_TOLERANCE_ALONE, _MEAN_TOGETHER = 1e-3, 0.1


class Answer(NamedTuple):
    """The tokens, and of the first its most probable ones with their log-probabilities."""

    tokens: list[int]
    top: dict[str, float]


def ask(server: Server, prompt: list[int], tokens: int) -> Answer:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": TOP}
    reply = server.post("/v1/completions", body | {"return_token_ids": True, "ignore_eos": True})
    assert reply.is_success, reply.text
    choice = reply.json()["choices"][0]
    return Answer(choice["token_ids"], choice["logprobs"]["top_logprobs"][0])


def ask_all(server: Server, tokens: int) -> tuple[list[Answer], list[Answer]]:
    """Each prompt alone, then many at once."""
    alone = [ask(server, prompt, tokens) for prompt in PROMPTS]
    many = [prompt for prompt in PROMPTS for _ in range(4)]
    with ThreadPoolExecutor(len(many)) as pool:
        return alone, list(pool.map(lambda prompt: ask(server, prompt, tokens), many))


class Answered(NamedTuple):
    """What one server answered, alone and together, and the state of its engines after that."""

    alone: list[Answer]
    together: list[Answer]
    engines: list[dict[str, Any]]


@pytest.fixture(scope="module", params=["minimax-m2", "minimax-m2-fp8"])
def answered(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Answered]:
    """Of plain vLLM, then as CONFIGS. All are asked side by side too: each compiles kernels."""
    model, logs = checkpoint(request.param), tmp_path_factory.mktemp(request.param)
    with ExitStack() as stack:
        plain = stack.enter_context(
            start(
                model,
                logs / "plain.log",
                options=_ROOM,
                environment={"VLLM_USE_V2_MODEL_RUNNER": "0"},
            )
        )
        ours = [stack.enter_context(_start(model, logs, config)) for config in CONFIGS]
        for server in (plain, *ours):
            server.wait_healthy(START_DEADLINE_S)
        with ThreadPoolExecutor() as pool:
            found = list(pool.map(_answers_of, (plain, *ours), ({}, *CONFIGS)))
            list(pool.map(lambda server: server.stop(), ours))
        assert [server.leftovers() for server in ours] == [[] for _ in ours]
        return found


def _answers_of(server: Server, config: dict[str, Any]) -> Answered:
    answers = ask_all(server, 1 if config.get("kv_free") else TOKENS)
    status = server.http.get("/expertplex/status")  # plain vLLM has none
    return Answered(*answers, status.json()["servers"] if status.is_success else [])


def _start(model: Path, logs: Path, config: dict[str, Any]) -> Any:
    name = "-".join(f"{key}{value}" for key, value in config.items())
    file = logs / f"{name}.json"
    file.write_text(json.dumps(config))
    asyncep = ("--executor", "asyncep", "--asyncep-config", str(file))
    return start(model, logs / f"{name}.log", options=(*_ROOM, *asyncep))


def _differences(plain: Answer, ours: Answer) -> list[float]:
    """Of the log-probabilities of tokens that both name."""
    return [abs(plain.top[t] - ours.top[t]) for t in plain.top.keys() & ours.top.keys()]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_answers_are_plain_vllms(answered: list[Answered], config: dict[str, Any]) -> None:
    plain, ours = answered[0], answered[1 + CONFIGS.index(config)]
    worst = max(max(_differences(p, o)) for p, o in zip(plain.alone, ours.alone, strict=True))
    pairs = zip(plain.together, ours.together, strict=True)
    mean = statistics.mean(x for p, o in pairs for x in _differences(p, o))
    print(f"{config}: alone at most {worst:.2g}; of many at once {mean:.2g} on average")
    assert worst <= _TOLERANCE_ALONE
    for p, o in zip(plain.alone, ours.alone, strict=True):
        assert o.tokens == p.tokens[: len(o.tokens)]
    assert mean <= _MEAN_TOGETHER
    for engine in ours.engines:
        assert engine["tokens"] > 0
        assert (engine["gathers"] > 0) == (config != {"gpus": 1})
