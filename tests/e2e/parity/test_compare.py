"""The comparison itself: it must see every difference, or the parity suite proves nothing."""

import copy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from .compare import compare, merge_stream
from .features import Probe, cases, concurrent_cases, length_cases, sense_cases
from .suite import Answers, Request, batch_invariant, judge, requests

_LEAVES = st.one_of(st.integers(0, 9), st.floats(-9, -1), st.text("ab", max_size=3), st.none())
_JSON = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text("xyz", min_size=1), inner, max_size=3)
    ),
    max_leaves=12,
)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all leaves."""
    if not isinstance(value, dict | list):
        return [path]
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [p for key, inner in items for p in _paths(inner, (*path, key))]


@given(_JSON)
def test_a_response_equals_itself(response: Any) -> None:
    assert compare(response, copy.deepcopy(response), 0.0) == ([], 0.0)


@given(st.dictionaries(st.text("xyz", min_size=1), _JSON, min_size=1), st.data(), _LEAVES)
def test_any_changed_leaf_is_found(response: Any, data: st.DataObject, value: Any) -> None:
    paths = _paths(response)
    if not paths:
        return
    *route, last = data.draw(st.sampled_from(paths))
    other = copy.deepcopy(response)
    node = other
    for key in route:
        node = node[key]
    changed = type(node[last]) is not type(value) or node[last] != value
    node[last] = value
    assert bool(compare(response, other, 0.0).differences) == changed


def test_tolerance_is_for_floats_only_and_the_largest_difference_is_reported() -> None:
    plain = {"logprobs": [-1.0, -2.0], "token_ids": [5, 6]}
    near = {"logprobs": [-1.00005, -2.0], "token_ids": [5, 6]}
    found = compare(plain, near, 1e-4)
    assert not found.differences
    assert abs(found.max_float_difference - 5e-5) < 1e-9
    assert compare(plain, near, 1e-5).differences
    assert compare(plain, {**plain, "token_ids": [5, 7]}, 1e-4).differences


def test_ranks_may_move_a_little_where_logprobs_may() -> None:
    def ranked(rank: int) -> dict[str, int]:
        return {"rank": rank}

    assert not compare(ranked(3711), ranked(3712), 1e-4).differences
    assert compare(ranked(3711), ranked(3800), 1e-4).differences
    assert compare(ranked(3711), ranked(3712), 0.0).differences


def test_identifiers_and_times_are_ignored() -> None:
    assert not compare({"id": "a", "created": 1}, {"id": "b", "created": 2}, 0.0).differences


def test_a_stream_merges_to_the_same_whatever_its_cuts() -> None:
    def event(index: int, text: str, **more: Any) -> dict[str, Any]:
        choice = {"index": index, "text": text, "token_ids": [len(text)], "finish_reason": None}
        return {"id": "x", "choices": [choice | more]}

    usage = {"choices": [], "usage": {"total_tokens": 3}}
    logprobs = {"token_logprobs": [-1.0], "tokens": ["a"]}
    merged = merge_stream(
        [
            event(1, "b"),
            event(0, "a", logprobs=logprobs),
            event(0, "", logprobs=logprobs, finish_reason="stop"),
            usage,
        ]
    )
    assert [choice["text"] for choice in merged["choices"]] == ["a", "b"]
    assert merged["choices"][0]["token_ids"] == [1, 0]
    assert merged["choices"][0]["logprobs"]["token_logprobs"] == [-1.0, -1.0]
    assert merged["choices"][0]["finish_reason"] == "stop"
    assert merged["choices"][1]["finish_reason"] is None
    assert merged["usage"] == {"total_tokens": 3}


_PROBE = Probe(list(range(12)), [f"t{i}" for i in range(12)])


def test_requests_are_distinct() -> None:
    keys = [request.key for request in requests(_PROBE, sense=True)]
    assert len(set(keys)) == len(keys)
    bodies = [str(case) for case in (*cases(_PROBE), *length_cases(), *sense_cases())]
    assert len(set(bodies)) == len(bodies)


def _answers(tokens: list[int], together: list[int]) -> Answers:
    keys = [Request(case).key for case in concurrent_cases()]
    return Answers(
        _PROBE,
        {key: {"token_ids": [t]} for key, t in zip(keys, tokens, strict=True)},
        {key: {"token_ids": [t]} for key, t in zip(keys, together, strict=True)},
    )


def test_concurrent_answers_count_only_where_plain_is_batch_invariant() -> None:
    numbers = list(range(16))
    steady, varying = _answers(numbers, numbers), _answers(numbers, numbers[::-1])
    assert batch_invariant(steady, "float32")
    assert not batch_invariant(varying, "float32")
    assert sum(bool(v.differences) for v in judge(steady, varying, "float32")) == 16
    assert not any(v.differences for v in judge(varying, steady, "float32"))
