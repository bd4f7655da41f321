"""Threads that take turns, and a step that runs as two of them, without a GPU."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm import forward_context
from vllm.config import CUDAGraphMode
from vllm.v1.worker.ubatching import dbo_current_ubatch_id

from vllm_expertplex.executor import turns
from vllm_expertplex.executor.microbatches import cutting, run_in_turns, sliced
from vllm_expertplex.executor.turns import PartnerFailed, Turns, taking


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.randoms())
def test_one_runs_at_a_time_in_order_until_each_is_over(
    times: list[int], rng: random.Random
) -> None:
    """Number i gives way times[i] times; the others go on without those that are over."""
    n = len(times)
    t, running, order = Turns(n, 10), threading.Lock(), []

    def thread(i: int) -> None:
        with taking(t, i, lambda: None):
            for left in range(times[i], -1, -1):
                with running:  # held while it runs: a second one would block and fail below
                    assert turns.number() == i
                    order.append(i)
                if left:
                    turns.give_way()

    with ThreadPoolExecutor(n) as pool:
        numbers = list(range(n))
        rng.shuffle(numbers)
        for ended in [pool.submit(thread, i) for i in numbers]:
            ended.result(20)
    assert turns.number() == 0
    rounds = [[i for i in range(n) if times[i] >= r] for r in range(max(times) + 1)]
    assert order == [i for round_ in rounds for i in round_]


def test_a_thread_that_fails_ends_the_others_wait() -> None:
    t = Turns(2, 10)

    def fails() -> None:
        with taking(t, 1, lambda: None):
            raise OSError("no disk")

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(fails)
        with pytest.raises(PartnerFailed, match="number 1"), taking(t, 0, lambda: None):
            turns.give_way()
        assert isinstance(other.exception(10), OSError)


def test_a_turn_that_is_kept_too_long_is_named() -> None:
    t = Turns(2, 0.05)
    with pytest.raises(TimeoutError, match=r"number 1 has waited 0\.05 s for number 0"):
        t.wait_for(1)


def test_outside_of_a_cut_step_nobody_waits() -> None:
    turns.give_way()
    assert turns.number() == 0


@pytest.fixture
def second():
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_halves_of_a_step_take_turns_and_see_their_own_context(second: ThreadPoolExecutor) -> None:
    seen = []

    def model(x: torch.Tensor, y: None) -> torch.Tensor:
        for layer in range(3):
            half = turns.number()
            assert forward_context.get_forward_context() == f"context {half}"
            assert dbo_current_ubatch_id() == half
            seen.append((layer, half))
            turns.give_way()
        assert torch.is_inference_mode_enabled()
        return x + 1

    x = torch.arange(7)
    parts = [sliced({"x": x, "y": None}, part) for part in (slice(0, 3), slice(3, 7))]
    out = run_in_turns(model, parts, ["context 0", "context 1"], second, lambda: None, 10)
    forward_context._forward_context = None
    assert torch.equal(out, x + 1)
    assert seen == [(layer, half) for layer in range(3) for half in range(2)]
    assert dbo_current_ubatch_id() == 0


@pytest.mark.parametrize("culprit", [0, 1])
def test_what_stops_one_half_is_raised_and_the_other_ends(
    second: ThreadPoolExecutor, culprit: int
) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        turns.give_way()
        if turns.number() == culprit:
            raise ValueError("bad layer")
        turns.give_way()
        return x

    parts = [{"x": torch.zeros(1)}] * 2
    with pytest.raises(ValueError, match="bad layer"):
        run_in_turns(model, parts, [None, None], second, lambda: None, 10)
    assert second.submit(lambda: 1).result(5) == 1


def test_a_second_half_that_cannot_begin_says_why(second: ThreadPoolExecutor) -> None:
    def no_device() -> None:
        raise OSError("no such device")

    def model(x: torch.Tensor) -> torch.Tensor:
        turns.give_way()
        return x

    parts = [{"x": torch.zeros(1)}] * 2
    with pytest.raises(OSError, match="no such device"):
        run_in_turns(model, parts, [None, None], second, no_device, 5)


@pytest.mark.parametrize("layers", [0, 1])
def test_nobody_waits_for_ever_for_a_half_that_hangs(
    second: ThreadPoolExecutor, layers: int
) -> None:
    release, ended = threading.Event(), threading.Event()

    def model(x: torch.Tensor) -> torch.Tensor:
        if turns.number() == 1:
            release.wait(20)
            ended.set()
        for _ in range(layers):
            turns.give_way()
        return x

    parts = [{"x": torch.zeros(1)}] * 2
    try:
        with pytest.raises(TimeoutError, match="number 1"):
            run_in_turns(model, parts, [None, None], second, lambda: None, 0.1)
        assert not ended.is_set()
    finally:
        release.set()


def test_positions_in_several_dimensions_are_cut_by_tokens() -> None:
    """M-RoPE has a row per dimension, also for text alone."""
    inputs = {"input_ids": torch.arange(5), "positions": torch.arange(15).view(3, 5)}
    part = sliced(inputs, slice(3, 5))
    assert part["input_ids"].tolist() == [3, 4]
    assert part["positions"].tolist() == [[3, 4], [8, 9], [13, 14]]


def step(tokens: int, *, may: bool = True, dummy: bool = False) -> dict:
    kind = {"force_uniform_decode": False} if dummy else {}
    return {"num_tokens": tokens, "allow_microbatching": may, **kind}


def test_only_large_steps_of_requests_are_cut() -> None:
    batch = SimpleNamespace(num_tokens=0)
    decide = cutting(lambda **_: (CUDAGraphMode.NONE, batch, False, None, None), 100)
    assert decide(**step(100))[2]
    assert not decide(**step(99))[2]
    assert not decide(**step(100, may=False))[2]  # a prompt that reads what another is writing
    assert not decide(**step(8192, dummy=True))[2]  # measures memory
    replayed = cutting(lambda **_: (CUDAGraphMode.FULL, batch, False, None, None), 100)
    assert not replayed(**step(100))[2]
