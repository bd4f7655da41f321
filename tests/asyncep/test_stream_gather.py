"""Gathers and computations that are only enqueued: whatever the pace of the two streams, every
layer is computed from its own weights.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_expertplex.asyncep.memory import Pair
from vllm_expertplex.asyncep.stream_gather import StreamGather


class _Mark:
    def __init__(self) -> None:
        self.at: int | None = None  # when it was passed

    def query(self) -> bool:
        return self.at is not None

    def elapsed_time(self, later: "_Mark") -> float:
        assert self.at is not None
        assert later.at is not None
        return (later.at - self.at) / 1000  # a step takes a microsecond


class _Stream:
    """Runs what was enqueued, in order, a step at a time."""

    def __init__(self, clock: list[int]) -> None:
        self._queue: deque[Callable[[], bool]] = deque()
        self._clock = clock

    def run(self, work: Callable[[], Any]) -> None:
        def step() -> bool:
            work()
            return True

        self._queue.append(step)

    def mark(self) -> _Mark:
        mark = _Mark()
        self.run(lambda: setattr(mark, "at", self._clock[0]))
        return mark

    def after(self, mark: Any) -> None:
        if mark is not None:
            self._queue.append(mark.query)

    def step(self) -> bool:
        """Go on, unless there is nothing to do or it has to wait."""
        if not self._queue or not self._queue[0]():
            return False
        self._queue.popleft()
        self._clock[0] += 1
        return True

    def copy(self, pairs: Sequence[Pair]) -> int:
        raise NotImplementedError  # the tests' pulls do not copy

    def finish(self) -> None:
        while self.step():
            pass


class _Engine:
    def __init__(self, layers: int) -> None:
        self.clock = [0]
        self.copies, self.computation = _Stream(self.clock), _Stream(self.clock)
        self.buffers = [-1, -1]
        self.computed: list[int] = []
        self.layers = layers
        self.gather = StreamGather(layers, self._pull, self.copies, self.computation)

    def _pull(self, layer: int, buffer: int) -> int:
        for content in (-1, layer):  # half written, then whole
            self.copies.run(lambda content=content: self._write(buffer, content))  # type: ignore[misc]
        return 10

    def _write(self, buffer: int, content: int) -> None:
        self.clock[0] += 50
        self.buffers[buffer] = content

    def forward(self, layer: int) -> None:
        self.gather.begin(layer)
        for _ in range(3):
            self.computation.run(lambda: self._read(layer))
        self.gather.end(layer)

    def _read(self, layer: int) -> None:
        assert self.buffers[layer % 2] == layer
        self.computed.append(layer)

    def drain(self) -> None:
        while self.copies.step() or self.computation.step():
            pass


@given(st.integers(1, 7), st.lists(st.sampled_from(["copy", "compute", "host"]), max_size=300))
def test_every_layer_is_computed_from_its_own_weights(layers: int, turns: list[str]) -> None:
    engine = _Engine(layers)
    asked = 0
    for turn in turns:
        if turn == "host":
            engine.forward(asked % layers)
            asked += 1
        else:
            (engine.copies if turn == "copy" else engine.computation).step()
    engine.drain()
    assert engine.computed == [layer % layers for layer in range(asked) for _ in range(3)]


@given(st.integers(3, 9), st.integers(1, 5))
def test_while_one_layer_is_computed_the_next_can_be_copied(layers: int, passes: int) -> None:
    """With layers whose buffers alternate, computing never needs a gather that needs it."""
    engine = _Engine(layers)
    engine.copies.finish()
    for index in range(passes * layers):
        engine.forward(index % layers)
        engine.computation.finish()
        engine.copies.finish()
    assert engine.gather.counters().waits == 0
    assert len(engine.computed) == 3 * passes * layers


def test_gathers_are_counted_when_they_have_ended() -> None:
    engine = _Engine(4)
    assert engine.gather.counters().gathers == 0
    engine.drain()
    counters = engine.gather.counters()
    assert (counters.gathers, counters.gathered_bytes) == (2, 20)
    assert counters.gather_ns > 0


def test_a_wait_for_a_gather_is_counted() -> None:
    engine = _Engine(4)
    engine.forward(0)
    engine.computation.finish()
    assert not engine.computed, "its weights are not there"
    engine.drain()
    counters = engine.gather.counters()
    assert counters.waits == 1
    assert counters.waited_ns > 0


def test_a_pass_that_leaves_layers_out_is_refused() -> None:
    engine = _Engine(4)
    engine.forward(0)
    with pytest.raises(RuntimeError, match=r"layer 2 .* expected layer 1"):
        engine.gather.begin(2)


def test_paused_layers_neither_wait_nor_count() -> None:
    engine = _Engine(3)
    engine.gather.pause(True)
    for layer in (2, 0, 1):
        engine.gather.begin(layer)
        engine.gather.end(layer)
    assert engine.gather.counters().layers == 0
    engine.gather.pause(False)
    engine.forward(0)
    engine.drain()
    assert engine.computed == [0, 0, 0]
