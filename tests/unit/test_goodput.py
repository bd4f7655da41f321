"""The goodput benchmark's search and accounting, without servers."""

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_expertplex.planner.workload import Targets

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from slo import client, search, workload
from slo.search import Attainment, Request

TARGETS = Targets(1.0, 0.1)


@given(st.floats(0.02, 500), st.floats(0.05, 200))
def test_the_search_finds_the_rate_where_a_system_gives_way(limit: float, start: float) -> None:
    tried = []

    def system(rate: float) -> Attainment:
        tried.append(rate)
        return Attainment(1, 1, 1.0 if rate <= limit else 0.89)

    found, probes = search.goodput(system, start, precision=0.05)
    assert found <= limit < found * 1.05
    assert sorted(tried) == [p.rate for p in probes]
    assert len(tried) < 30


@pytest.mark.parametrize(("answer", "expected"), [(0.0, 0.0), (1.0, 800.0)])
def test_a_search_without_an_end_stops(answer: float, expected: float) -> None:
    found, _ = search.goodput(lambda _: Attainment(answer, answer, answer), 100.0)
    assert found == expected


@given(st.integers(1, 6))
def test_a_search_tries_no_more_rates_than_allowed(most: int) -> None:
    def system(rate: float) -> Attainment:
        return Attainment(1, 1, 1.0 if rate <= 20 else 0.0)

    found, probes = search.goodput(system, 7.0, most=most)
    assert len(probes) == most
    assert found == max((p.rate for p in probes if p.rate <= 20), default=0)


def test_failures_and_either_target_count_against_a_system() -> None:
    requests = [
        Request(True, 0.5, 0.05),
        Request(True, 2.0, 0.05),
        Request(True, 0.5, 0.2),
        Request(False, 0.1, 0.01),
        Request(True, 0.5, None),
    ]
    assert search.attainment(requests, TARGETS) == Attainment(0.6, 0.6, 0.4)
    with pytest.raises(ValueError, match="no requests"):
        search.attainment([], TARGETS)


def test_requests_are_read_from_the_clients_result() -> None:
    result = {
        "errors": ["", "", "refused"],
        "ttfts": [0.5, 0.25, 0.0],
        "itls": [[0.1, 0.2, 0.3], [], []],
        "output_lens": [4, 1, 0],
    }
    first, second, third = client.requests(result)
    assert first == Request(True, 0.5, pytest.approx(0.2))
    assert second == Request(True, 0.25, None)
    assert not third.ok


@pytest.fixture(scope="module")
def tokenizer():
    from vllm_expertplex.checkpoints.tokenizer import train_tokenizer

    return train_tokenizer()


def test_prompts_have_exactly_the_lengths_of_the_workload(tokenizer, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("ContextTokens,GeneratedTokens\n40,7\n900,3\n25,11\n")
    said: list[str] = []
    path = tmp_path / "requests.jsonl"
    workload.write_requests(path, tokenizer, str(trace), 30, 100, 1, said.append)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    found = {(len(tokenizer(r["prompt"]).input_ids), r["output_tokens"]) for r in rows}
    assert len(rows) == 30
    assert found == {(40, 7), (25, 11)}
    assert len({r["prompt"] for r in rows}) == 30
    assert "exceed 100 tokens" in said[0]


def test_a_workload_that_does_not_fit_is_refused(tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"0% .* fit into 100 tokens"):
        workload.write_requests(tmp_path / "r.jsonl", tokenizer, "90/20", 5, 100, 1)
