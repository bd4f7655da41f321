"""The background gather: fills whole-layer buffers from all engines' shards while others compute.

Owns: when a layer is copied, and the waits between that and computing, by a thread.
Must not know: vLLM, where shards lie, how a layer is computed.

No engine waits for another: shards are read-only, and every engine pulls at its own pace. Where
copies order themselves behind the computation, no thread is needed: `stream_gather.py`.
"""

import threading
import time
from collections.abc import Callable
from typing import Protocol

from vllm_expertplex.asyncep.board import Counters
from vllm_expertplex.asyncep.memory import Computation, Mark
from vllm_expertplex.asyncep.order import GatherOrder

Pull = Callable[[int, int, Mark | None], int]
"""(layer, buffer, mark) -> bytes: put the layer in the buffer, once the mark is passed."""


class GatherError(RuntimeError):
    """A layer could not be gathered, or not in time."""


class Gather(Protocol):
    """Gathers every layer in turn, ahead of its use, into the buffers of `GatherOrder`.

    The computing side calls `begin(layer)` before it reads a layer's buffer and `end(layer)` after.
    Both are for one thread only.
    """

    def begin(self, layer: int) -> None: ...

    def end(self, layer: int) -> None: ...

    def pause(self, paused: bool) -> None:
        """While paused, layers are computed with whatever is in the buffers: for measuring."""

    def counters(self) -> Counters: ...

    def close(self) -> None: ...


class ThreadGather:
    """A thread pulls; a pull is over when it returns.

    `computation`: where the computing thread only enqueues its work, what orders pulls behind it.
    """

    def __init__(
        self, layers: int, pull: Pull, timeout_s: float, computation: Computation | None = None
    ) -> None:
        self._order = GatherOrder(layers)
        self._pull = pull
        self._timeout_s = timeout_s
        self._computation = computation
        self._used: list[Mark | None] = [None] * GatherOrder.BUFFERS
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._stopped = False
        self._paused = False
        self._gathers = self._gather_ns = self._bytes = 0
        self._waits = self._waited_ns = self._layers = 0
        self._thread = threading.Thread(target=self._run, name="asyncep-gather", daemon=True)
        self._thread.start()

    def begin(self, layer: int) -> None:
        """Return once `layer` is in its buffer. Raises GatherError naming it after the deadline."""
        if self._paused:
            return
        with self._changed:
            if self._order.ready(layer):
                return
            started = time.perf_counter_ns()
            came = self._changed.wait_for(
                lambda: self._error is not None or self._order.ready(layer), self._timeout_s
            )
            self._waits += 1
            self._waited_ns += time.perf_counter_ns() - started
            if self._error is not None:
                raise GatherError(f"gathering experts failed: {self._error}") from self._error
            if not came:
                raise GatherError(
                    f"the experts of gathered layer {layer} were not there after "
                    f"gather_timeout_s = {self._timeout_s:g} s"
                )

    def end(self, layer: int) -> None:
        """The buffer of `layer` may be overwritten."""
        if self._paused:
            return
        with self._changed:
            if self._computation is not None:
                self._used[self._order.buffer(layer)] = self._computation.mark()
            self._order.used()
            self._layers += 1
            self._changed.notify_all()

    def pause(self, paused: bool) -> None:
        self._paused = paused

    def counters(self) -> Counters:
        with self._changed:
            return Counters(
                self._gathers,
                self._gather_ns,
                self._bytes,
                self._waits,
                self._waited_ns,
                self._layers,
            )

    def close(self) -> None:
        """Stop the thread after the gather it is in."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped or self._order.may_fill())
                    if self._stopped:
                        return
                    layer = self._order.layer_to_fill
                    buffer = self._order.buffer(layer)
                    used = self._used[buffer]
                started = time.perf_counter_ns()
                copied = self._pull(layer, buffer, used)
                with self._changed:
                    self._gathers += 1
                    self._gather_ns += time.perf_counter_ns() - started
                    self._bytes += copied
                    self._order.filled()
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
