"""`/v1/choose`: the model's own probabilities, siblings that share, refusals that say why."""

import math
from collections.abc import Iterator
from typing import Any

import pytest

from ..server import Server
from .conftest import Start

pytestmark = pytest.mark.e2e
_PROMPT = [11, *range(200, 299)]


@pytest.fixture(scope="module")
def server(start: Start) -> Iterator[Server]:
    with start(gpus=2) as server:
        yield server


def _logprob(server: Server, prompt: list[int], label: list[int]) -> float:
    """The label's logprob by vLLM's own prompt_logprobs."""
    body = {"prompt": [*prompt, *label], "max_tokens": 1, "prompt_logprobs": 0}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    tail = choice["prompt_logprobs"][len(prompt) :]
    return math.fsum(entry[str(token)]["logprob"] for entry, token in zip(tail, label, strict=True))


def _choose(server: Server, **body: Any) -> dict[str, Any]:
    reply = server.post("/v1/choose", body)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize(
    "labels",
    [[[5], [6], [7]], [[5, 8, 9], [5, 8, 10], [6], [5, 7]]],
    ids=["one token", "several tokens"],
)
def test_probabilities_are_those_of_the_label_tokens(
    server: Server, labels: list[list[int]]
) -> None:
    truth = [_logprob(server, _PROMPT, label) for label in labels]
    answer = _choose(server, prompt=_PROMPT, labels=labels)
    found = [row["logprob"] for row in answer["labels"]]
    assert found == pytest.approx(truth, abs=1e-3)
    total = math.fsum(math.exp(value - max(truth)) for value in truth)
    assert [row["probability"] for row in answer["labels"]] == pytest.approx(
        [math.exp(value - max(truth)) / total for value in truth], abs=1e-3
    )
    assert answer["label"] == labels[truth.index(max(truth))]


def test_options_are_asked_about_together(server: Server) -> None:
    before = server.http.get("/expertplex/status").json()
    options = [f"option {letter}" for letter in "abcdef"]
    text = "The following text is long enough to fill some blocks. " * 12
    answer = _choose(server, prompt=text, options=options)
    after = server.http.get("/expertplex/status").json()
    assert [row["option"] for row in answer["options"]] == options
    for row in answer["options"]:
        yes, no = row["logprobs"].values()
        assert row["probability"] == pytest.approx(1 / (1 + math.exp(no - yes)))
        assert row["selected"] == (row["probability"] >= 0.5)
    # One batch on one engine, and the shared text computed once.
    assert after["batches"] == before["batches"] + 1
    worked = [
        engine
        for engine, old in zip(after["servers"], before["servers"], strict=True)
        if engine["tokens"] > old["tokens"]
    ]
    assert len(worked) == 1
    usage = answer["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] * 0.6


def test_chat_messages_and_text_labels(server: Server) -> None:
    messages = [{"role": "user", "content": "Is water wet?"}]
    answer = _choose(server, messages=messages, labels=["yes", "no"])
    assert {row["label"] for row in answer["labels"]} == {"yes", "no"}
    assert math.fsum(row["probability"] for row in answer["labels"]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"prompt": "x", "labels": ["yes"]}, "at least two"),
        ({"prompt": [1], "labels": [[4], [4, 5]]}, "cannot be told apart"),
        ({"prompt": "x"}, "either labels"),
        ({"labels": ["a", "b"]}, "either prompt or messages"),
        ({"prompt": "x", "options": []}, "options is empty"),
        ({"prompt": [1], "labels": [[4], [10**9]]}, "expected ids below"),
        ({"prompt": [1] * 2050, "labels": [[4], [5]]}, "maximum"),
    ],
)
def test_refusals(server: Server, body: dict[str, Any], reason: str) -> None:
    reply = server.post("/v1/choose", body)
    assert reply.status_code == 400
    assert reason in reply.text
    assert server.http.get("/expertplex/status").json()["held"] == 0


def test_vllms_own_scoring_still_works(server: Server) -> None:
    body = {"query": _PROMPT, "items": [[3], [4]], "label_token_ids": [5, 6]}
    reply = server.post("/generative_scoring", body)
    assert reply.status_code == 200, reply.text
    ours = _choose(server, prompt=[*_PROMPT, 4], labels=[[5], [6]])
    assert reply.json()["data"][1]["score"] == pytest.approx(
        ours["labels"][0]["probability"], abs=1e-3
    )
