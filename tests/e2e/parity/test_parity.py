"""The part of the parity matrix that runs on every change: one tiny model, one layout, also with
prefill steps cut in two, or attention over two ranks (and a second layout with the slow tests).

The whole matrix is `python -m tests.e2e.parity.matrix`.
"""

import json
import re
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from ..models import checkpoint
from ..server import Server, serve
from .compare import compare
from .features import COMPLETIONS, PROBE, Case
from .suite import Answers, Request, ask, judge, run

pytestmark = pytest.mark.e2e
MODEL = "minimax-m2"
DTYPE = "float32"


_STREAMED = {"completion", "chat", "seed", "2 seeded", "later token", "JSON schema", "text"}
_LENGTHS = {"1 tokens", "16 tokens", "17 tokens", "128 tokens", "1025 tokens", "context filled"}


def _chosen(request: Request) -> bool:
    """Some requests of each kind, to stay within minutes on two cores."""
    if request.case.group == "lengths":
        return request.case.name in _LENGTHS
    return not request.stream or request.case.name in _STREAMED


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


def _serve(logs: Path, layout: str | None, *options: str) -> AbstractContextManager[Server]:
    log = logs / f"{layout or 'plain'}{len(options)}.log"
    return serve(checkpoint(MODEL), log, layout=layout, options=("--dtype", DTYPE, *options))


@pytest.fixture(scope="module")
def plain(logs: Path) -> Answers:
    """Plain vLLM's answers, after a control: another seed must be seen as a difference."""
    with _serve(logs, None) as server:
        answers = run(server, only=_chosen)
        sampled = Case("sampling", "seed", COMPLETIONS, {**PROBE.body, "temperature": 1, "seed": 7})
        other = sampled._replace(body=sampled.body | {"seed": 8})
        seven, again, eight = (ask(server, Request(case)) for case in (sampled, sampled, other))
    assert not compare(seven, again, 0.0).differences
    assert compare(seven, eight, 1e-4).differences
    return answers


@pytest.mark.parametrize("layout", [pytest.param("1P1D1E", marks=pytest.mark.slow), "2P1D3E"])
def test_answers_are_those_of_plain_vllm(layout: str, plain: Answers, logs: Path) -> None:
    with _serve(logs, layout) as server:
        ours = run(server, plain.probe, only=_chosen)
    assert not different(plain, ours)


def different(plain: Answers, ours: Answers) -> dict[str, str]:
    return {v.key: str(v.differences[0]) for v in judge(plain, ours, DTYPE) if v.differences}


def test_answers_are_the_same_when_prefill_steps_run_as_two_microbatches(
    plain: Answers, logs: Path, tmp_path: Path
) -> None:
    config = tmp_path / "overlap.toml"
    config.write_text("tbo_tokens = 2")
    with _serve(logs, "1P1D1E", "--expertplex-config", str(config)) as server:
        before = remote_layers(server)
        one = Case("lengths", "a step", COMPLETIONS, {**PROBE.body, "max_tokens": 1})
        assert "choices" in ask(server, Request(one))
        layers = json.loads((checkpoint(MODEL) / "config.json").read_text())["num_hidden_layers"]
        assert remote_layers(server) - before == 2 * layers
        ours = run(server, plain.probe, only=_chosen)
    assert not different(plain, ours)


def test_answers_are_the_same_when_two_ranks_share_attention(plain: Answers, logs: Path) -> None:
    with _serve(logs, "1P1D1E", "--tensor-parallel-size", "2") as server:
        ours = run(server, plain.probe, only=_of_every_rank)
    asked = {key: plain.single[key] for key in ours.single}
    assert not different(plain._replace(single=asked), ours)


@pytest.mark.slow
def test_answers_are_the_same_with_kv_in_fp8(logs: Path) -> None:
    fp8 = ("--kv-cache-dtype", "fp8")
    with _serve(logs, None, *fp8) as server:
        plain = run(server, only=_of_every_rank)
    with _serve(logs, "1P1D1E", *fp8) as server:
        ours = run(server, plain.probe, only=_of_every_rank)
    assert not different(plain, ours)


def _of_every_rank(request: Request) -> bool:
    """Steps of one token and of many, draws of every rank's own generator, grammars."""
    groups = {"lengths", "sampling", "n", "structured", "16 prompts"}
    return request.case.group in groups and not request.stream and _chosen(request)


def remote_layers(server: Server) -> int:
    """MoE layers that the prefill server has sent away so far."""
    metrics = server.http.get("/metrics").text
    found = re.findall(r'^expertplex:remote_layers_total{.*"prefill".*} (.+)$', metrics, re.M)
    return sum(int(float(count)) for count in found)
