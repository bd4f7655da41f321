"""What every serving mode is made of: prefill queues, and decode ranks with their KV caches.

Owns: batching, KV reservation, finishing. Must not know: how long anything takes.

A request reserves KV for its prompt and whole output when it enters a rank; real engines grow the
reservation and preempt, which this leaves out.
"""

from collections import deque

import numpy as np

from vllm_expertplex.simulator.requests import Requests
from vllm_expertplex.simulator.steps import NOTHING, Work


class PrefillQueue:
    """Prompts waiting for one prefill server. A batch takes whole prompts up to a token budget."""

    def __init__(self, requests: Requests, budget: int, most: int) -> None:
        self.requests, self.budget, self.most = requests, budget, most
        self.waiting: deque[int] = deque()
        self.tokens = 0

    def add(self, request: int) -> None:
        self.waiting.append(request)
        self.tokens += self.requests.inputs[request]

    def take(self, room: float = float("inf")) -> tuple[list[int], Work]:
        """The next batch: at least one prompt, however long, if `room` KV tokens hold it."""
        batch: list[int] = []
        work = NOTHING
        while self.waiting and len(batch) < self.most:
            length = self.requests.inputs[self.waiting[0]]
            if length > room or (batch and work.tokens + length > self.budget):
                break
            batch.append(self.waiting.popleft())
            work = work.plus(0, length)
            room -= length
        self.tokens -= int(work.tokens)
        return batch, work

    def drain(self) -> list[int]:
        """Give up everything that waits."""
        left, self.tokens = list(self.waiting), 0
        self.waiting.clear()
        return left


class DecodePool:
    """Decode ranks that step together; one iteration gives each running request one token."""

    def __init__(self, requests: Requests, ranks: int, kv_tokens: float, slots: int) -> None:
        self.requests = requests
        self.capacity, self.slots = kv_tokens, slots
        self.count = np.zeros(ranks)  # running requests
        self.context = np.zeros(ranks)  # tokens in their KV caches
        self.reserved = np.zeros(ranks)  # tokens they may come to hold
        self.alive = np.ones(ranks, dtype=bool)
        self.iteration = 0
        self._ends: dict[int, list[int]] = {}
        self._rank: dict[int, int] = {}

    @property
    def running(self) -> int:
        return int(self.count.sum())

    def need(self, request: int) -> int:
        return self.requests.inputs[request] + self.requests.outputs[request]

    def place(self, request: int) -> int | None:
        """The least reserved rank with room, or None."""
        load = np.where(self.alive & (self.count < self.slots), self.reserved, np.inf)
        rank = int(np.argmin(load))
        return rank if load[rank] + self.need(request) <= self.capacity else None

    def reserve(self, request: int, rank: int) -> None:
        self.reserved[rank] += self.need(request)
        self._rank[request] = rank

    def start(self, request: int) -> None:
        """Begin to decode a request that has a reservation and its first token."""
        rank = self._rank[request]
        self.count[rank] += 1
        self.context[rank] += self.requests.inputs[request]
        last = self.iteration + self.requests.outputs[request] - 1
        self._ends.setdefault(last, []).append(request)

    def release(self, request: int) -> None:
        """Free a reservation that never started."""
        self.reserved[self._rank.pop(request)] -= self.need(request)

    def shape(self) -> tuple[float, float, float]:
        """(fullest rank's requests, all requests, fullest rank's mean context)."""
        most = float(self.count.max())
        return most, float(self.count.sum()), float(self.context.max()) / max(most, 1.0)

    def advance(self, now: float) -> list[int]:
        """Finish one iteration at time `now`; returns the requests that ended."""
        self.iteration += 1
        self.context += self.count
        ended = self._ends.pop(self.iteration, [])
        for request in ended:
            self._leave(request)
            self.requests.finish[request] = now
        return ended

    def _leave(self, request: int) -> None:
        rank = self._rank.pop(request)
        self.count[rank] -= 1
        self.context[rank] -= self.need(request) - 1
        self.reserved[rank] -= self.need(request)

    def add_rank(self) -> None:
        for name in ("count", "context", "reserved"):
            setattr(self, name, np.append(getattr(self, name), 0.0))
        self.alive = np.append(self.alive, True)

    def lose_rank(self, rank: int) -> list[int]:
        """A rank dies: its running and reserved requests, which must start again."""
        self.alive[rank] = False
        lost = [request for request, at in self._rank.items() if at == rank]
        for request in lost:
            del self._rank[request]
        for last, ending in list(self._ends.items()):
            self._ends[last] = [r for r in ending if r in self._rank]
        self.count[rank] = self.context[rank] = self.reserved[rank] = 0.0
        return lost
