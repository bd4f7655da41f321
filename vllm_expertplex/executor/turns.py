"""Threads of which one runs at a time, each until it gives way to the next.

Owns: whose turn it is, and that nobody waits for a thread that has failed or hangs.
Must not know: what the threads do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PartnerFailed(RuntimeError):
    """Another thread failed, so that there is nobody left to take turns with."""


class Turns:
    """`n` threads, numbered; number 0 begins. Each does its work under `taking`."""

    def __init__(self, n: int, timeout_s: float) -> None:
        self._n, self._timeout_s = n, timeout_s
        self._turn, self._over, self._failed = 0, [False] * n, False
        self._changed = threading.Condition()

    def wait_for(self, mine: int) -> None:
        """Returns when it is the turn of thread `mine`.

        Raises PartnerFailed where another has failed, TimeoutError naming the one that has kept its
        turn too long.
        """
        with self._changed:
            came = self._changed.wait_for(
                lambda: self._failed or self._turn == mine, self._timeout_s
            )
            if self._failed:
                raise PartnerFailed(f"number {self._turn}, which takes turns with {mine}, failed")
            if not came:
                raise TimeoutError(
                    f"number {mine} has waited {self._timeout_s:g} s for number {self._turn} to "
                    "give way"
                )

    def pass_on(self, mine: int) -> None:
        """The next that is not over may run; this one where there is no other."""
        with self._changed:
            for step in range(1, self._n):
                following = (mine + step) % self._n
                if not self._over[following]:
                    self._turn = following
                    self._changed.notify_all()
                    return

    def end(self, mine: int, failed: bool) -> None:
        """Thread `mine` takes no further turn."""
        with self._changed:
            self._over[mine] = True
            if failed and not self._failed:
                self._failed, self._turn = True, mine
                self._changed.notify_all()
        if not failed:
            self.pass_on(mine)


_here = threading.local()  # `number`, `give_way`: of a thread that takes turns


@contextmanager
def taking(turns: Turns, mine: int, resume: Callable[[], None]) -> Iterator[None]:
    """Inside, this thread is number `mine`. `resume` is called whenever its turn comes.

    Raises what `Turns.wait_for` raises. Who leaves by an exception has failed.
    """

    def give_way() -> None:
        turns.pass_on(mine)
        turns.wait_for(mine)
        resume()

    failed = True
    try:
        turns.wait_for(mine)
        resume()
        _here.number, _here.give_way = mine, give_way
        yield
        failed = False
    finally:
        _here.number, _here.give_way = 0, None
        turns.end(mine, failed)


def number() -> int:
    """This thread's number; 0 where it takes no turns."""
    return getattr(_here, "number", 0)


def give_way() -> None:
    """Let the others run first; returns at once where this thread takes no turns."""
    here: Callable[[], None] | None = getattr(_here, "give_way", None)
    if here is not None:
        here()
