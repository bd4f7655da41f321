"""Colocated serving: every GPU does both phases, with expert parallelism over all of them.

Owns: `Colocated`, where a prefill iteration stalls decode, and `Chunked`, where prompt chunks ride
on decode iterations. Attention is data-parallel over groups of `tp` GPUs.
"""

from collections import deque

from vllm_expertplex.planner.setup import Setting
from vllm_expertplex.simulator.pools import DecodePool
from vllm_expertplex.simulator.requests import Requests
from vllm_expertplex.simulator.steps import NOTHING, Knobs, ModelSteps
from vllm_expertplex.simulator.systems.base import CannotServe, System
from vllm_expertplex.simulator.systems.lockstep import admit


class Colocated(System):
    """Prompts that wait and fit are prefilled first; decode stalls meanwhile."""

    name = "colocated"

    def __init__(
        self, setting: Setting, gpus: int, requests: Requests, knobs: Knobs, tp: int = 1
    ) -> None:
        super().__init__(setting, gpus, requests, knobs)
        if gpus % tp:
            raise CannotServe(f"{self.name}: {gpus} GPUs are no whole groups of {tp}")
        experts_on = min(gpus, setting.model.experts)
        self.ranks = gpus // tp
        if self.ranks == 1:
            self.latency.as_one_group(gpus)
        self.steps = ModelSteps(self.latency, experts_on, tp, knobs=knobs)
        self.pool = DecodePool(
            requests, self.ranks, self.kv_tokens(experts_on, tp), setting.assumptions.decode_slots
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
        batch, work, tokens = admit(self.waiting, self.pool, budget, self.ranks)
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
        self, setting: Setting, gpus: int, requests: Requests, knobs: Knobs, chunk: int = 2048,
        tp: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(setting, gpus, requests, knobs, tp)
        self.per_rank = max(1, chunk // self.ranks)
        self.chunking: list[deque[tuple[int, int]]] = [deque() for _ in range(self.ranks)]

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
