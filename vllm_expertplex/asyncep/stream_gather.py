"""The background gather where copies and computation are both enqueued: streams and events.

Owns: which waits go into which stream when. Must not know: CUDA, vLLM, where shards lie.

The thread that enqueues a layer's computation also enqueues the gather that may overwrite its
buffer, behind an event of that computation. So there is no thread, and the host never waits.
"""

from collections import deque
from collections.abc import Callable

from vllm_expertplex.asyncep.board import Counters
from vllm_expertplex.asyncep.memory import Channel, Computation, Mark
from vllm_expertplex.asyncep.order import GatherOrder


class StreamGather:
    """`Gather` with copies on `channel`: `pull(layer, buffer)` enqueues them and returns bytes."""

    def __init__(
        self,
        layers: int,
        pull: Callable[[int, int], int],
        channel: Channel,
        computation: Computation,
    ) -> None:
        self._order = GatherOrder(layers)
        self._pull, self._channel, self._computation = pull, channel, computation
        self._filled: list[Mark | None] = [None] * GatherOrder.BUFFERS
        self._used: list[Mark | None] = [None] * GatherOrder.BUFFERS
        self._paused = False
        self._gathering, self._waiting = _Stopwatch(), _Stopwatch(least_ns=_INSTANT_NS)
        self._bytes = self._layers = 0
        self._fill()

    def begin(self, layer: int) -> None:
        """Let what is computed from now on wait for `layer`."""
        if self._paused:
            return
        if not self._order.ready(layer):
            raise RuntimeError(f"gathered layer {layer} was never begun: expected it under way")
        asked, filled = self._computation.mark(), self._filled[self._order.buffer(layer)]
        assert filled is not None
        self._computation.after(filled)
        self._waiting.add(asked, self._computation.mark())

    def end(self, layer: int) -> None:
        """What has been enqueued is the last that reads the buffer of `layer`."""
        if self._paused:
            return
        self._used[self._order.buffer(layer)] = self._computation.mark()
        self._order.used()
        self._layers += 1
        self._fill()

    def _fill(self) -> None:
        while self._order.may_fill():
            layer = self._order.layer_to_fill
            buffer = self._order.buffer(layer)
            self._channel.after(self._used[buffer])
            begun = self._channel.mark()
            self._bytes += self._pull(layer, buffer)
            self._filled[buffer] = filled = self._channel.mark()
            if begun is not None and filled is not None:  # as they are on any stream
                self._gathering.add(begun, filled)
            self._order.filled()

    def pause(self, paused: bool) -> None:
        self._paused = paused

    def counters(self) -> Counters:
        """Times are of what has ended."""
        gathers, gather_ns = self._gathering.read()
        waits, waited_ns = self._waiting.read()
        return Counters(gathers, gather_ns, self._bytes, waits, waited_ns, self._layers)

    def close(self) -> None:
        """Return once nothing is copied any more."""
        self._channel.finish()


# Two events beside each other in a stream are a few microseconds apart: that is no wait.
_INSTANT_NS = 10_000


class _Stopwatch:
    """Adds up the times between pairs of marks, as far as they have been passed."""

    def __init__(self, least_ns: int = 0) -> None:
        self._least_ns = least_ns
        self._pending: deque[tuple[Mark, Mark]] = deque()
        self._count = self._ns = 0

    def add(self, begin: Mark, end: Mark) -> None:
        self._pending.append((begin, end))

    def read(self) -> tuple[int, int]:
        """How many there were, and nanoseconds."""
        while self._pending and self._pending[0][1].query():
            begin, end = self._pending.popleft()
            taken = int(begin.elapsed_time(end) * 1e6)
            if taken >= self._least_ns:
                self._count += 1
                self._ns += taken
        return self._count, self._ns
