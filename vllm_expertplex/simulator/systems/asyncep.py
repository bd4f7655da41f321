"""AsyncEP (MoE-Prefill): prefill-only serving that moves expert weights to the tokens.

Owns: `AsyncEP`. Every GPU works on its own; while it computes a layer, the next layer's experts are
gathered from the others. A layer takes the longer of the two.
"""

from vllm_expertplex.planner.setup import Setting
from vllm_expertplex.simulator.pools import PrefillQueue
from vllm_expertplex.simulator.requests import Requests
from vllm_expertplex.simulator.steps import Knobs, Work
from vllm_expertplex.simulator.systems.base import CannotServe, System


class AsyncEP(System):
    """`wait`: seconds a GPU waits for a batch that hides the gather; then it runs a smaller one."""

    name = "asyncep"

    def __init__(
        self, setting: Setting, gpus: int, requests: Requests, knobs: Knobs, wait: float = 0.1
    ) -> None:
        super().__init__(setting, gpus, requests, knobs)
        if max(requests.outputs) > 1:
            raise CannotServe(
                "asyncep serves prefill-only loads (one output token); found outputs up to "
                f"{max(requests.outputs)}"
            )
        model = setting.model
        layer = model.experts * model.expert_weight_bytes
        kept = model.routed_bytes / gpus + 3 * layer  # shard, first layer, two gather buffers
        free = setting.memory().usable - setting.memory().attention_server(1) - kept
        if free < 0:
            raise CannotServe(f"asyncep: weights miss {-free / 1e9:.1f} GB on {setting.gpu.name}")
        self.gather = self.latency.network.weight_gather(gpus) * model.moe_layers
        self.wait = wait
        budget = max(setting.assumptions.prefill_tokens, self.saturation())
        self.queues = [PrefillQueue(requests, budget, 1 << 30) for _ in range(gpus)]
        self.busy = [False] * gpus

    def saturation(self) -> int:
        """Tokens whose computation hides the weight gather: the paper's threshold T."""
        low, high = 1, 1 << 20
        while low < high:
            middle = (low + high) // 2
            if self._compute(Work(middle, middle * 1000.0)) >= self.gather:
                high = middle
            else:
                low = middle + 1
        return low

    def arrive(self, request: int) -> None:
        queue = min(range(self.gpus), key=lambda g: self.queues[g].tokens + (self.busy[g] << 40))
        self.queues[queue].add(request)
        if self.queues[queue].tokens >= self.queues[queue].budget:
            self._start(queue)
        else:
            self.clock.after(self.wait, lambda: self._start(queue))

    def _start(self, gpu: int) -> None:
        if self.busy[gpu] or not self.queues[gpu].waiting:
            return
        self.busy[gpu] = True
        batch, work = self.queues[gpu].take()
        seconds = max(self._compute(work), self.gather) + self.setting.assumptions.host_prefill
        self.clock.after(seconds, lambda: self._end(gpu, batch))

    def _end(self, gpu: int, batch: list[int]) -> None:
        self.busy[gpu] = False
        for request in batch:
            self.first_token(request)
        self._start(gpu)

    def _compute(self, work: Work) -> float:
        """One forward pass: the prompts count as ones of the length that makes as much work."""
        return self.latency.whole_pass(work.tokens, work.squares / work.tokens)
