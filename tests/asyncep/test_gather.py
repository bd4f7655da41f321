"""The gather thread against a computing thread: right layers, named failures, a clean end."""

import random
import time
from typing import Any

import pytest

from vllm_expertplex.asyncep.gather import GatherError, ThreadGather


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 7])
def test_every_pass_sees_every_layer(layers: int) -> None:
    buffers = [-1, -1]
    pause = random.Random(layers)

    def pull(layer: int, buffer: int, used: object) -> int:
        buffers[buffer] = -1
        time.sleep(pause.random() * 1e-3)
        buffers[buffer] = layer
        return 10

    gather = ThreadGather(layers, pull, timeout_s=5)
    for _ in range(20):
        for layer in range(layers):
            gather.begin(layer)
            assert buffers[layer % 2] == layer
            time.sleep(pause.random() * 1e-3)
            assert buffers[layer % 2] == layer
            gather.end(layer)
    counters = gather.counters()
    gather.close()
    assert counters.layers == 20 * layers
    assert counters.gathered_bytes == 10 * counters.gathers
    if layers <= 2:
        assert counters.gathers == layers


def test_after_idling_nothing_waits() -> None:
    gather = ThreadGather(4, lambda layer, buffer, used: 0, timeout_s=5)
    deadline = time.monotonic() + 5
    while gather.counters().gathers < 2 and time.monotonic() < deadline:
        time.sleep(1e-3)
    gather.begin(0)
    gather.end(0)
    gather.begin(1)
    assert gather.counters().waits == 0
    gather.close()


def test_a_failed_pull_reaches_the_computing_thread() -> None:
    def pull(layer: int, buffer: int, used: object) -> int:
        raise OSError("the shard is gone")

    gather = ThreadGather(3, pull, timeout_s=5)
    with pytest.raises(GatherError, match="the shard is gone"):
        gather.begin(0)


def test_a_gather_that_never_ends_is_named() -> None:
    gather = ThreadGather(3, lambda layer, buffer, used: time.sleep(1) or 0, timeout_s=0.05)
    with pytest.raises(GatherError, match=r"layer 0 .*gather_timeout_s = 0.05"):
        gather.begin(0)
    gather.close()


def test_paused_layers_neither_wait_nor_count() -> None:
    gather = ThreadGather(3, lambda layer, buffer, used: 0, timeout_s=5)
    gather.pause(True)
    for layer in (2, 0, 1):
        gather.begin(layer)
        gather.end(layer)
    assert gather.counters().layers == 0
    gather.pause(False)
    gather.begin(0)
    gather.close()


def test_a_pull_comes_after_what_was_computed_in_its_buffer() -> None:
    """Where computing is only enqueued, the thread learns the point to wait for."""

    class Computation:
        made = 0

        def mark(self) -> Any:
            self.made += 1
            return self.made

        def after(self, mark: object) -> None:
            raise AssertionError("pulls are over when they return")

        def finish(self) -> None:
            raise AssertionError("nobody waits for the computation")

    seen: list[tuple[int, object]] = []

    def pull(layer: int, buffer: int, used: object) -> int:
        seen.append((layer, used))
        return 0

    gather = ThreadGather(5, pull, 5.0, Computation())
    for layer in (0, 1, 2, 3, 4, 0):
        gather.begin(layer)
        gather.end(layer)
    gather.close()
    # Buffers hold layers 0, 2, 4 and 1, 3; layer i was computed as the (i + 1)-th.
    assert seen[:5] == [(0, None), (1, None), (2, 1), (3, 2), (4, 3)]
    assert seen[5] == (0, 5)
