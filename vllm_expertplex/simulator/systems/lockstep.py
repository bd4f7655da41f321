"""Prefill and decode on the same ranks, all ranks stepping together.

Owns: the loop that colocated serving, chunked prefill and the prefill side of PDD share.
"""

from collections import deque

from vllm_expertplex.simulator.pools import DecodePool, PrefillQueue
from vllm_expertplex.simulator.requests import Requests
from vllm_expertplex.simulator.steps import NOTHING, Work


class LockstepPrefill:
    """One prefill queue per rank; a batch takes from every rank at once."""

    def __init__(self, requests: Requests, ranks: int, budget: int, most: int) -> None:
        self.requests = requests
        self.queues = [PrefillQueue(requests, budget, most) for _ in range(ranks)]

    @property
    def waiting(self) -> bool:
        return any(queue.waiting for queue in self.queues)

    def add(self, request: int) -> None:
        min(self.queues, key=lambda q: q.tokens).add(request)

    def take(self) -> tuple[list[int], Work, float]:
        """(requests, fullest rank's work, tokens of all ranks)."""
        batch: list[int] = []
        fullest, tokens = NOTHING, 0.0
        for queue in self.queues:
            taken, work = queue.take()
            batch += taken
            tokens += work.tokens
            fullest = max(fullest, work)
        return batch, fullest, tokens


def admit(waiting: deque[int], pool: DecodePool, budget: float, ranks: int) -> tuple[
    list[int], Work, float
]:  # fmt: skip
    """Admit prompts to ranks that have KV room, first come first served.

    budget: tokens per rank and iteration. Returns the batch, the fullest rank's work, all tokens.
    """
    batch: list[int] = []
    work = [NOTHING] * ranks
    while waiting:
        request = waiting[0]
        length = pool.requests.inputs[request]
        rank = pool.place(request)
        if rank is None or (work[rank].tokens and work[rank].tokens + length > budget):
            break
        pool.reserve(request, rank)
        batch.append(waiting.popleft())
        work[rank] = work[rank].plus(0, length)
    return batch, max(work), sum(w.tokens for w in work)
