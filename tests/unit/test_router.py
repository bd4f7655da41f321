"""Which server takes the next request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_expertplex.client.router import NoServerLeft, Router


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 5), st.integers(0, 3))
def test_the_least_loaded_server_is_chosen(loads: list[int], servers: int, start: int) -> None:
    router = Router("decode", range(start, start + servers))
    for load in loads:
        before = router.load
        chosen = router.take(load)
        assert before[chosen] == min(before.values())
        assert router.load == before | {chosen: before[chosen] + load}


def test_what_a_server_need_not_do_counts_and_is_not_charged() -> None:
    router = Router("prefill", range(2))
    assert router.take(10, {0: 0, 1: 8}) == 1
    assert router.load == {0: 0, 1: 2}
    assert router.take(5, {0: 0, 1: 4}) == 1
    assert router.take(5, {0: 0, 1: 2}) == 0  # 5 there, 3 + 3 at the other
    router.release(1, 3)
    assert router.load == {0: 5, 1: 0}


@given(st.integers(1, 6), st.integers(0, 3), st.integers(1, 5))
def test_equal_servers_take_turns(servers: int, start: int, rounds: int) -> None:
    router = Router("prefill", range(start, start + servers))
    turns = [router.take(1) for _ in range(servers * rounds)]
    for turn in range(rounds):
        assert sorted(turns[turn * servers :][:servers]) == router.servers


def test_turns_also_without_load_between_them() -> None:
    router = Router("prefill", range(3))
    chosen = []
    for _ in range(6):
        chosen.append(router.take(5))
        router.release(chosen[-1], 5)
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_a_lost_server_is_never_chosen_again() -> None:
    router = Router("decode", range(2, 4))
    router.take(10)
    router.remove(3)
    router.remove(3)
    router.release(3, 1)
    assert router.load == {2: 10}
    assert router.take(1) == 2
    router.remove(2)
    with pytest.raises(NoServerLeft, match="no decode server is left"):
        router.take(1)
