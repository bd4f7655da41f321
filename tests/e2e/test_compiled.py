"""Models that torch.compile has compiled: plain vLLM's answers, and the cache is used again."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from .models import checkpoint
from .server import Server, serve

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

# Mode 3 is vLLM's default on GPUs.
_COMPILED = ("--no-enforce-eager", "--compilation-config", '{"mode": 3}', "--dtype", "float32")
_LENGTHS = (1, 2, 17, 700, 1500)  # of prompts; a step takes 512 tokens
_NATS = 1e-4  # fp32 that two halves of a step round otherwise


class _Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[float]


def _answers(server: Server) -> list[_Answer]:
    answers = []
    for length in _LENGTHS:
        body = {
            "prompt": [length, *(100 + i * 7 % 3000 for i in range(1, length))],
            "max_tokens": 16,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "logprobs": 2,
        }
        response = server.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        answers.append(_Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"]))
    return answers


def _compiled(cache: Path) -> set[str]:
    """The keys under which vLLM has kept compiled models."""
    kept = cache.glob("torch_compile_cache/torch_aot_compile/*/*/model")
    return {model.parts[-3] for model in kept}


def _serve(log: Path, cache: Path, *options: str, **how: Any) -> Any:
    # With shared experts, which run while the routed ones are computed elsewhere.
    model, environment = checkpoint("qwen2-moe"), {"VLLM_CACHE_ROOT": str(cache)}
    return serve(model, log, options=(*_COMPILED, *options), environment=environment, **how)


def test_compiled_models_answer_as_plain_vllm_and_are_found_in_the_cache(tmp_path: Path) -> None:
    with _serve(tmp_path / "plain.log", tmp_path / "plain-cache") as plain:
        expected = _answers(plain)
    options = tmp_path / "options.json"
    options.write_text('{"tbo_tokens": 2}')  # every prefill step is cut in two
    ours, keys = ("--expertplex-config", str(options)), []
    for start in ("first", "second"):
        log, cache = tmp_path / f"{start}.log", tmp_path / "cache"
        with _serve(log, cache, *ours, layout="1P1D2E") as server:
            for found, wanted in zip(_answers(server), expected, strict=True):
                assert found.tokens == wanted.tokens
                assert found.logprobs == pytest.approx(wanted.logprobs, abs=_NATS)
        keys.append(_compiled(cache))
    assert len(keys[0]) == 2  # the prefill server's and the decode server's
    assert keys[0] == keys[1]
