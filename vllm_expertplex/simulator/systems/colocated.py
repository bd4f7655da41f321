"""Colocated serving: every GPU does both phases, data-parallel attention and expert parallelism.

Owns: `Colocated`, where a prefill iteration stalls decode, and `Chunked`, where prompt chunks ride
on decode iterations.
"""

from collections import deque

from vllm_expertplex.planner.setup import Setting
from vllm_expertplex.simulator.pools import DecodePool
from vllm_expertplex.simulator.requests import Requests
from vllm_expertplex.simulator.steps import NOTHING, Knobs, ModelSteps
from vllm_expertplex.simulator.systems.base import System
from vllm_expertplex.simulator.systems.lockstep import admit


class Colocated(System):
    """Prompts that wait and fit are prefilled first; decode stalls meanwhile."""

    name = "colocated"

    def __init__(self, setting: Setting, gpus: int, requests: Requests, knobs: Knobs) -> None:
        super().__init__(setting, gpus, requests, knobs)
        experts_on = min(gpus, setting.model.experts)
        self.steps = ModelSteps(self.latency, experts_on, knobs=knobs)
        self.pool = DecodePool(
            requests, gpus, self.kv_tokens(experts_on), setting.assumptions.decode_slots
        )
        self.waiting: deque[int] = deque()
        self.busy = False

    def arrive(self, request: int) -> None:
        if self.pool.need(request) > self.pool.capacity:
            self.refuse(request)
            return
        self.waiting.append(request)
        self.step()

    def step(self) -> None:
        """Start the next iteration, if any."""
        if self.busy:
            return
        budget = self.setting.assumptions.prefill_tokens
        batch, work, tokens = admit(self.waiting, self.pool, budget, self.gpus)
        if batch:
            self.busy = True
            seconds = self.steps.prefill(work, tokens, 1.0).total
            self.clock.after(seconds, lambda: self._prefilled(batch))
        elif self.pool.running:
            self.busy = True
            each, running, length = self.pool.shape()
            self.clock.after(self.steps.decode(each, running, length, 1.0).total, self._decoded)

    def _prefilled(self, batch: list[int]) -> None:
        self.busy = False
        for request in batch:
            if self.first_token(request):
                self.pool.release(request)
            else:
                self.pool.start(request)
        self.step()

    def _decoded(self) -> None:
        self.busy = False
        self.pool.advance(self.clock.now)
        self.step()


class Chunked(Colocated):
    """Each iteration decodes everything and prefills up to `chunk` prompt tokens in all.

    SGLang divides the configured chunk by the data-parallel size, hence "in all".
    """

    name = "chunked"

    def __init__(
        self, setting: Setting, gpus: int, requests: Requests, knobs: Knobs, chunk: int = 2048
    ) -> None:
        super().__init__(setting, gpus, requests, knobs)
        self.per_rank = max(1, chunk // gpus)
        self.chunking: list[deque[tuple[int, int]]] = [deque() for _ in range(gpus)]

    def step(self) -> None:
        """Start the next mixed iteration, if any."""
        if self.busy:
            return
        while self.waiting and (rank := self.pool.place(self.waiting[0])) is not None:
            request = self.waiting.popleft()
            self.pool.reserve(request, rank)
            self.chunking[rank].append((request, 0))
        done: list[int] = []
        fullest, tokens = NOTHING, 0.0
        for queue in self.chunking:
            work, room = NOTHING, self.per_rank
            while queue and room:
                request, start = queue.popleft()
                stop = min(self.requests.inputs[request], start + room)
                work, room = work.plus(start, stop), room - (stop - start)
                if stop == self.requests.inputs[request]:
                    done.append(request)
                else:
                    queue.appendleft((request, stop))
            fullest, tokens = max(fullest, work), tokens + work.tokens
        if not tokens and not self.pool.running:
            return
        self.busy = True
        each, running, length = self.pool.shape()
        seconds = self.steps.mixed(fullest, each, length, tokens, running).total
        self.clock.after(seconds, lambda: self._mixed(done))

    def _mixed(self, done: list[int]) -> None:
        self.busy = False
        self.pool.advance(self.clock.now)
        self._prefilled(done)
