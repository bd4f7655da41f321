"""vLLM's scheduler, which begins with a batch when all of it has come.

Owns: holding an incomplete batch back. Must not know: why requests were put together.

Requests of a batch arrive one by one. An idle engine would begin with the first one alone, and
gather every layer for it: the very thing batches are made to avoid.
"""

import time
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from vllm_expertplex.asyncep.tags import batch_of

# Longer than messages of one batch are apart; only a request that never comes (one that vLLM
# refused on its way) makes the others wait for it.
PATIENCE_S = 0.05


class Assembly:
    """Batches that are not complete."""

    def __init__(self) -> None:
        self._arrived: dict[int, list[Any]] = {}
        self._deadline: dict[int, float] = {}

    def add(self, item: Any, batch: int, size: int, now: float) -> list[Any]:
        """Take one of `size` items; returns all of them with the last one, else nothing."""
        arrived = self._arrived.setdefault(batch, [])
        self._deadline.setdefault(batch, now + PATIENCE_S)
        arrived.append(item)
        return self._take(batch) if len(arrived) >= size else []

    def overdue(self, now: float) -> list[Any]:
        """Items of batches that have waited long enough."""
        late = [batch for batch, deadline in self._deadline.items() if now >= deadline]
        return [item for batch in late for item in self._take(batch)]

    def _take(self, batch: int) -> list[Any]:
        del self._deadline[batch]
        return self._arrived.pop(batch)

    def __len__(self) -> int:
        return sum(len(arrived) for arrived in self._arrived.values())


class BatchScheduler(Scheduler):
    """The scheduler of an engine."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._assembly = Assembly()

    def add_request(self, request: Any) -> None:
        batch = batch_of(request)
        if batch is None:
            super().add_request(request)
            return
        for complete in self._assembly.add(request, *batch, time.monotonic()):
            super().add_request(complete)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if len(self._assembly):
            for late in self._assembly.overdue(time.monotonic()):
                super().add_request(late)
        return super().schedule(*args, **kwargs)

    def get_num_unfinished_requests(self) -> int:
        # With work announced, the engine looks again after a millisecond instead of sleeping.
        return super().get_num_unfinished_requests() + len(self._assembly)
