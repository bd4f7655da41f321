"""Simulated time: a queue of callbacks. Owns: the clock. Must not know: what happens."""

import heapq
from collections.abc import Callable


class Clock:
    """Runs callbacks in order of time; equal times in order of scheduling."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Run `action` at `time`, which must not be in the past."""
        if time < self.now:
            raise ValueError(f"event at {time} s scheduled at {self.now} s: it is in the past")
        self._count += 1
        heapq.heappush(self._queue, (time, self._count, action))

    def after(self, delay: float, action: Callable[[], None]) -> None:
        self.at(self.now + delay, action)

    def step(self) -> bool:
        """Run the next callback; False when there is none."""
        if not self._queue:
            return False
        self.now, _, action = heapq.heappop(self._queue)
        action()
        return True
