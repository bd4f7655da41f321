"""SM-partitioned colocation (Green Context, as in MuxWise): both phases at once on every GPU.

Owns: `GreenContext`. Attention is tensor-parallel over all GPUs of a node group, experts are expert
parallel. While both phases run, decode has `decode_share` of the SMs for the whole model, prefill
the rest; alone, a phase has all SMs. The partition of an iteration is fixed when it starts.
"""

from collections import deque

from vllm_expertplex.planner.setup import Setting
from vllm_expertplex.simulator.pools import DecodePool
from vllm_expertplex.simulator.requests import Requests
from vllm_expertplex.simulator.steps import Knobs, ModelSteps, Timing
from vllm_expertplex.simulator.systems.base import CannotServe, System
from vllm_expertplex.simulator.systems.lockstep import admit


class GreenContext(System):
    name = "green-context"

    def __init__(
        self, setting: Setting, gpus: int, requests: Requests, knobs: Knobs,
        decode_share: float = 0.5,
    ) -> None:  # fmt: skip
        super().__init__(setting, gpus, requests, knobs)
        heads = min(a.heads for a in setting.model.attention)
        if gpus > heads:
            raise CannotServe(
                f"green-context: attention is tensor-parallel over all GPUs; {gpus} cannot share "
                f"{heads} heads"
            )
        experts_on = min(gpus, setting.model.experts)
        self.share = decode_share
        self.latency.as_one_group(gpus)
        self.steps = ModelSteps(self.latency, experts_on, tp=gpus, knobs=knobs)
        slots = setting.assumptions.decode_slots * gpus
        self.pool = DecodePool(requests, 1, self.kv_tokens(experts_on, tp=gpus), slots)
        self.waiting: deque[int] = deque()
        self.moved: list[int] = []
        self.prefilling = self.stepping = False

    def arrive(self, request: int) -> None:
        if self.pool.need(request) > self.pool.capacity:
            self.refuse(request)
            return
        self.waiting.append(request)
        self._start_prefill()

    def _start_prefill(self) -> None:
        if self.prefilling:
            return
        budget = self.setting.assumptions.prefill_tokens
        batch, work, tokens = admit(self.waiting, self.pool, budget, 1)
        if not batch:
            return
        self.prefilling = True
        share = 1.0 - self.share if self.stepping else 1.0
        timing = self.steps.prefill(work, tokens, share)
        # attention, too, has only the partition; it is arithmetic-bound
        self.clock.after(self._whole(timing, share), lambda: self._end_prefill(batch))

    def _end_prefill(self, batch: list[int]) -> None:
        self.prefilling = False
        for request in batch:
            if self.first_token(request):
                self.pool.release(request)
            else:
                self.moved.append(request)
        self._start_prefill()
        self._start_decode()

    def _start_decode(self) -> None:
        if self.stepping:
            return
        for request in self.moved:
            self.pool.start(request)
        self.moved.clear()
        if not self.pool.running:
            return
        self.stepping = True
        each, batch, length = self.pool.shape()
        share = self.share if self.prefilling else 1.0
        timing = self.steps.decode(each, batch, length, share)
        bandwidth = min(1.0, share / self.setting.assumptions.hbm_saturation)
        self.clock.after(self._whole(timing, bandwidth), self._end_decode)

    def _end_decode(self) -> None:
        self.stepping = False
        self.pool.advance(self.clock.now)
        self._start_prefill()
        self._start_decode()

    @staticmethod
    def _whole(timing: Timing, share: float) -> float:
        """Stretch what is not MoE time (already on its share) to the share of the partition."""
        return timing.moe + max(0.0, timing.total - timing.moe) / share
