"""Batches are begun whole, and a request that never comes does not hold the others."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from vllm_expertplex.asyncep import tags
from vllm_expertplex.asyncep.scheduler import PATIENCE_S, Assembly


@given(st.lists(st.integers(1, 5), max_size=8), st.randoms())
def test_every_batch_comes_out_once_and_whole(sizes: list[int], shuffle: object) -> None:
    items = [(batch, i) for batch, size in enumerate(sizes) for i in range(size)]
    shuffle.shuffle(items)  # type: ignore[attr-defined]
    assembly = Assembly()
    out: list[list[tuple[int, int]]] = []
    for item in items:
        done = assembly.add(item, item[0], sizes[item[0]], 0.0)
        if done:
            out.append(done)
    assert sorted(sorted(batch) for batch in out) == [
        [(batch, i) for i in range(size)] for batch, size in enumerate(sizes)
    ]
    assert len(assembly) == 0


def test_an_incomplete_batch_begins_after_a_while() -> None:
    assembly = Assembly()
    assert assembly.add("a", 7, 3, 1.0) == []
    assert assembly.add("b", 7, 3, 1.01) == []
    assert assembly.overdue(1.0 + PATIENCE_S / 2) == []
    assert assembly.overdue(1.0 + PATIENCE_S) == ["a", "b"]
    assert len(assembly) == 0
    # The one that comes after all: alone.
    assert assembly.add("c", 7, 3, 2.0) == []
    assert assembly.overdue(2.0 + PATIENCE_S) == ["c"]


def test_tags_keep_what_a_request_carries_already() -> None:
    params = SimpleNamespace(extra_args={"mine": 1, **tags.group("g", 2)})
    request = SimpleNamespace(sampling_params=params, pooling_params=None)
    assert tags.batch_of(request) is None
    tags.set_batch(request, 5, 3)
    assert tags.batch_of(request) == (5, 3)
    assert tags.group_of(request) == ("g", 2)
    assert params.extra_args["mine"] == 1
    pooling = SimpleNamespace(
        sampling_params=None, pooling_params=SimpleNamespace(extra_kwargs=None)
    )
    tags.set_batch(pooling, 1, 1)
    assert tags.batch_of(pooling) == (1, 1)
