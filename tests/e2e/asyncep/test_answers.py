"""Answers and logprobs are plain vLLM's, however many engines share the experts, and where from."""

import json
from typing import Any

import pytest

from ..models import checkpoint
from ..parity.compare import compare
from ..parity.features import COMPLETIONS, Case
from ..parity.suite import Answers, Request, ask, judge, run
from ..server import serve
from .conftest import DTYPE, Start
from .requests import chosen

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
_TOLERANCE = 1e-4


@pytest.mark.parametrize(
    "config",
    [
        {"gpus": 1},
        {"gpus": 2},
        {"gpus": 3},  # 8 experts: not divisible
        {"gpus": 2, "offload_layers": 2},
        {"gpus": 1, "offload_layers": 1},
    ],
    ids=str,
)
def test_answers_are_those_of_plain_vllm(
    config: dict[str, int], plain: Answers, start: Start
) -> None:
    with start(**config) as server:
        ours = run(server, plain.probe, only=chosen)
        status = server.http.get("/expertplex/status").json()
    different = {v.key: str(v.differences[0]) for v in judge(plain, ours, DTYPE) if v.differences}
    assert not different
    assert len(status["servers"]) == config["gpus"]
    for engine in status["servers"]:
        gathers = config != {"gpus": 1}
        assert (engine["gathers"] > 0) == gathers
        assert engine["tokens"] > 0  # every engine took part
        assert engine["backlog_flops"] == 0
    assert status["held"] == 0


def _one_token(prompt: list[int], **body: Any) -> Request:
    common = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 5}
    name = f"{len(prompt)} tokens {body}"
    return Request(Case("one token", name, COMPLETIONS, {**common, **body}))


_PROMPTS = [
    [7 + i, *range(100, 99 + length)] for i, length in enumerate((1, 31, 32, 33, 700, 1500))
]
_ASKED = [_one_token(p) for p in _PROMPTS] + [_one_token(_PROMPTS[3], prompt_logprobs=1)]


@pytest.mark.parametrize(
    ("model", "dtype"),
    # Where there is AMX, vLLM's latent attention takes no float32.
    [("minimax-m2", "float32"), ("qwen2-moe", "float32"), ("deepseek-v3", "bfloat16")],
)
def test_other_routers_shared_experts_and_latent_attention(
    model: str, dtype: str, start: Start, tmp_path: Any
) -> None:
    same = ("--dtype", dtype, "--block-size", "32")
    asked = [*_ASKED[:5], _one_token(_PROMPTS[2], max_tokens=8, ignore_eos=True)]
    with serve(checkpoint(model), tmp_path / "plain.log", options=same) as server:
        plain = [ask(server, request) for request in asked]
    with start(*same, model=model, gpus=2) as server:
        ours = [ask(server, request) for request in asked]
    assert [compare(p, o, _TOLERANCE).differences for p, o in zip(plain, ours, strict=True)] == [
        [] for _ in asked
    ]


def test_without_kv_one_token_is_answered_and_more_are_refused(start: Start, tmp_path: Any) -> None:
    with serve(checkpoint("qwen3-moe"), tmp_path / "plain.log", options=("--dtype", DTYPE)) as s:
        plain = [ask(s, request) for request in _ASKED]
    with start("--max-num-batched-tokens", "2048", gpus=2, kv_free=True) as server:
        ours = [ask(server, request) for request in [*_ASKED, *_ASKED]]
        refused = ask(server, _one_token([1, 2, 3], max_tokens=2))
        status = server.http.get("/expertplex/status").json()
    assert [
        compare(p, o, _TOLERANCE).differences for p, o in zip([*plain, *plain], ours, strict=True)
    ] == [[] for _ in ours]
    assert refused["status"] == 400
    assert "KV-free mode" in str(refused["body"])
    assert all(engine["cached_tokens"] == 0 for engine in status["servers"])


def test_scoring_and_classifying_pooling_models(start: Start, tmp_path: Any) -> None:
    """A head of two token logits, as rerankers have."""
    overrides = {"classifier_from_token": ["a", "b"], "method": "from_2_way_softmax"}
    convert = ("--runner", "pooling", "--convert", "classify")
    options = (*convert, "--hf-overrides", json.dumps(overrides))
    asked = [
        ("/classify", {"input": ["some text", "another text that is a little longer"]}),
        ("/score", {"text_1": "a question", "text_2": ["one answer", "another answer"]}),
    ]
    model = checkpoint("qwen3-moe")
    with serve(model, tmp_path / "plain.log", options=("--dtype", DTYPE, *options)) as server:
        plain = [server.post(path, body).json() for path, body in asked]
    with start(*options, gpus=2) as server:
        ours = [server.post(path, body).json() for path, body in asked]
    assert all(reply["data"] for reply in plain)
    assert [compare(p, o, _TOLERANCE).differences for p, o in zip(plain, ours, strict=True)] == [
        [],
        [],
    ]
