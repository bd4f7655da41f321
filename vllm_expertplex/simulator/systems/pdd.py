"""Prefill-decode disaggregation: two instances, each with all experts, on half the GPUs each.

Owns: `Disaggregated`. Each half runs data-parallel attention and expert parallelism in lock-step.
"""

from collections import deque
from functools import partial

from vllm_expertplex.planner.setup import Setting
from vllm_expertplex.simulator.pools import DecodePool
from vllm_expertplex.simulator.requests import Requests
from vllm_expertplex.simulator.steps import Knobs, ModelSteps
from vllm_expertplex.simulator.systems.base import CannotServe, System
from vllm_expertplex.simulator.systems.lockstep import LockstepPrefill


class Disaggregated(System):
    name = "pdd"

    def __init__(
        self, setting: Setting, gpus: int, requests: Requests, knobs: Knobs,
        prefill_gpus: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(setting, gpus, requests, knobs)
        prefill_gpus = prefill_gpus or gpus // 2
        decode_gpus = gpus - prefill_gpus
        if min(prefill_gpus, decode_gpus) < 1:
            raise CannotServe(f"pdd needs at least 2 GPUs, found {gpus}")
        a, experts = setting.assumptions, setting.model.experts
        held_p = self.kv_tokens(min(prefill_gpus, experts))
        held_d = self.kv_tokens(min(decode_gpus, experts))
        latency_p, latency_d = setting.latency(prefill_gpus), setting.latency(decode_gpus)
        self.prefill_steps = ModelSteps(latency_p, min(prefill_gpus, experts), knobs=knobs)
        self.decode_steps = ModelSteps(latency_d, min(decode_gpus, experts), knobs=knobs)
        budget = int(min(a.prefill_tokens, held_p))
        self.prefill = LockstepPrefill(requests, prefill_gpus, budget, a.max_prefill_requests)
        self.prefill_capacity = held_p * prefill_gpus
        self.held = 0.0
        self.longest = min(held_p, held_d)
        self.decode = DecodePool(requests, decode_gpus, held_d, a.decode_slots)
        self.ready: deque[int] = deque()
        self.moved: list[int] = []
        self.link_free = [0.0] * prefill_gpus
        self.prefilling = self.stepping = False

    def arrive(self, request: int) -> None:
        if self.decode.need(request) > self.longest:
            self.refuse(request)
            return
        self.prefill.add(request)
        self._start_prefill()

    def _start_prefill(self) -> None:
        if self.prefilling or not self.prefill.waiting or self.held > self.prefill_capacity:
            return
        batch, work, tokens = self.prefill.take()
        self.prefilling = True
        self.held += tokens
        seconds = self.prefill_steps.prefill(work, tokens, 1.0).total
        self.clock.after(seconds, lambda: self._end_prefill(batch))

    def _end_prefill(self, batch: list[int]) -> None:
        self.prefilling = False
        for request in batch:
            if self.first_token(request):
                self.held -= self.requests.inputs[request]
            else:
                self.ready.append(request)
        self._move_kv()
        self._start_prefill()

    def _move_kv(self) -> None:
        while self.ready and (rank := self.decode.place(self.ready[0])) is not None:
            request = self.ready.popleft()
            self.decode.reserve(request, rank)
            size = float(self.latency.network.kv_transfer(self.requests.inputs[request]))
            link = self.link_free.index(min(self.link_free))
            self.link_free[link] = max(self.link_free[link], self.clock.now) + size
            self.clock.at(self.link_free[link], partial(self._kv_moved, request))

    def _kv_moved(self, request: int) -> None:
        self.held -= self.requests.inputs[request]
        self.moved.append(request)
        self._start_prefill()
        self._start_decode()

    def _start_decode(self) -> None:
        if self.stepping:
            return
        for request in self.moved:
            self.decode.start(request)
        self.moved.clear()
        if self.decode.running:
            self.stepping = True
            each, batch, length = self.decode.shape()
            seconds = self.decode_steps.decode(each, batch, length, 1.0).total
            self.clock.after(seconds, self._end_decode)

    def _end_decode(self) -> None:
        self.stepping = False
        if self.decode.advance(self.clock.now) or self.ready:
            self._move_kv()
        self._start_decode()
