"""`vllm serve --executor asyncep` on GPUs answers as plain vLLM does, from the same kernels.

All servers of a model start side by side: most of a start is not GPU work. Two GPUs are needed, and
some gigabytes of each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
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
TOP = 5
START_DEADLINE_S = 170.0
# Small enough for all of them on two GPUs, and no profiling, which others would disturb.
_ROOM = ("--gpu-memory-utilization", "0.4", "--kv-cache-memory-bytes", "1000000000")
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


class Running(NamedTuple):
    plain: Server
    ours: list[Server]  # as CONFIGS


@pytest.fixture(scope="module", params=["minimax-m2", "minimax-m2-fp8"])
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
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
        yield Running(plain, ours)
        for server in ours:
            server.stop()
            assert not server.leftovers()


def _start(model: Path, logs: Path, config: dict[str, Any]) -> Any:
    name = "-".join(f"{key}{value}" for key, value in config.items())
    file = logs / f"{name}.json"
    file.write_text(json.dumps(config))
    asyncep = ("--executor", "asyncep", "--asyncep-config", str(file))
    whole_prompts = ("--max-num-batched-tokens", "2048") if config.get("kv_free") else ()
    return start(model, logs / f"{name}.log", options=(*_ROOM, *asyncep, *whole_prompts))


def _differences(plain: Answer, ours: Answer) -> list[float]:
    """Of the log-probabilities of tokens that both name."""
    return [abs(plain.top[t] - ours.top[t]) for t in plain.top.keys() & ours.top.keys()]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_answers_are_plain_vllms(running: Running, config: dict[str, Any]) -> None:
    tokens = 1 if config.get("kv_free") else 8
    server = running.ours[CONFIGS.index(config)]
    alone, together = ask_all(server, tokens)
    plain_alone, plain_together = ask_all(running.plain, tokens)
    worst = max(max(_differences(p, o)) for p, o in zip(plain_alone, alone, strict=True))
    pairs = zip(plain_together, together, strict=True)
    off = [x for p, o in pairs for x in _differences(p, o)]
    mean = sum(off) / len(off)
    same = sum(p.tokens == o.tokens for p, o in zip(plain_alone, alone, strict=True))
    print(f"{config}: alone at most {worst:.2g}, mean of many {mean:.2g}; same text {same}/5")
    assert worst <= _TOLERANCE_ALONE
    assert [p.tokens for p in plain_alone] == [o.tokens for o in alone]
    assert mean <= _MEAN_TOGETHER
    engines = server.http.get("/expertplex/status").json()["servers"]
    for engine in engines:
        assert engine["tokens"] > 0
        assert (engine["gathers"] > 0) == (config != {"gpus": 1})
