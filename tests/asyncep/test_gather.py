"""The gather thread against a computing thread: right layers, named failures, a clean end."""

import random
import time

import pytest

from vllm_expertplex.asyncep.gather import Gather, GatherError


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 7])
def test_every_pass_sees_every_layer(layers: int) -> None:
    buffers = [-1, -1]
    pause = random.Random(layers)

    def pull(layer: int, buffer: int) -> int:
        buffers[buffer] = -1
        time.sleep(pause.random() * 1e-3)
        buffers[buffer] = layer
        return 10

    gather = Gather(layers, pull, timeout_s=5)
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
    gather = Gather(4, lambda layer, buffer: 0, timeout_s=5)
    deadline = time.monotonic() + 5
    while gather.counters().gathers < 2 and time.monotonic() < deadline:
        time.sleep(1e-3)
    gather.begin(0)
    gather.end(0)
    gather.begin(1)
    assert gather.counters().waits == 0
    gather.close()


def test_a_failed_pull_reaches_the_computing_thread() -> None:
    def pull(layer: int, buffer: int) -> int:
        raise OSError("the shard is gone")

    gather = Gather(3, pull, timeout_s=5)
    with pytest.raises(GatherError, match="the shard is gone"):
        gather.begin(0)


def test_a_gather_that_never_ends_is_named() -> None:
    gather = Gather(3, lambda layer, buffer: time.sleep(1) or 0, timeout_s=0.05)
    with pytest.raises(GatherError, match=r"layer 0 .*gather_timeout_s = 0.05"):
        gather.begin(0)
    gather.close()


def test_paused_layers_neither_wait_nor_count() -> None:
    gather = Gather(3, lambda layer, buffer: 0, timeout_s=5)
    gather.pause(True)
    for layer in (2, 0, 1):
        gather.begin(layer)
        gather.end(layer)
    assert gather.counters().layers == 0
    gather.pause(False)
    gather.begin(0)
    gather.close()
