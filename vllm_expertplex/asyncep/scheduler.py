"""vLLM's scheduler, which begins with a batch when all of it has come.

Owns: holding an incomplete batch back. Must not know: why requests were put together.

Requests of a batch arrive one by one. An idle engine would begin with the first one alone, and
gather every layer for it: the very thing batches are made to avoid.
"""

import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
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


class _Assembling:
    """In front of one of vLLM's schedulers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._assembly = Assembly()

    def add_request(self, request: Any) -> None:
        batch = batch_of(request)
        complete = (
            [request] if batch is None else self._assembly.add(request, *batch, time.monotonic())
        )
        self._add(complete)

    def _add(self, requests: list[Any]) -> None:
        for request in requests:
            super().add_request(request)  # type: ignore[misc]

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if len(self._assembly):
            self._add(self._assembly.overdue(time.monotonic()))
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def get_num_unfinished_requests(self) -> int:
        # With work announced, the engine looks again after a millisecond instead of sleeping.
        return int(super().get_num_unfinished_requests()) + len(self._assembly)  # type: ignore[misc]


class BatchScheduler(_Assembling, Scheduler):
    """The scheduler of an engine."""


class AsyncBatchScheduler(_Assembling, AsyncScheduler):
    """The scheduler of an engine that plans a step while another runs."""
