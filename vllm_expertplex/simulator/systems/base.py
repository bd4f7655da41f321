"""What a simulated serving mode has in common. Owns: the run loop and arrivals."""

from vllm_expertplex.planner.impossible import Infeasible
from vllm_expertplex.planner.setup import Setting
from vllm_expertplex.simulator.events import Clock
from vllm_expertplex.simulator.requests import Requests
from vllm_expertplex.simulator.steps import Knobs


class CannotServe(Infeasible):
    """The mode cannot run this model or load on these GPUs; the message says why."""


class System:
    """A serving mode: `arrive` is called for each request at its time."""

    name = ""

    def __init__(self, setting: Setting, gpus: int, requests: Requests, knobs: Knobs) -> None:
        self.setting, self.gpus, self.requests, self.knobs = setting, gpus, requests, knobs
        self.latency = setting.latency(gpus)
        self.clock = Clock()
        self._next = 0

    def arrive(self, request: int) -> None:
        raise NotImplementedError

    def run(self, deadline: float) -> None:
        """Simulate until every request has ended or `deadline` seconds have passed."""
        self._schedule_arrival()
        while self.clock.now <= deadline and self.clock.step():
            pass

    def first_token(self, request: int) -> bool:
        """Record the first token now; True when it was also the last."""
        self.requests.first[request] = self.clock.now
        if self.requests.outputs[request] == 1:
            self.requests.finish[request] = self.clock.now
            return True
        return False

    def refuse(self, request: int) -> None:
        """A request that could never be held: it stays unserved and counts as a miss."""
        self.requests.refused += 1

    def _schedule_arrival(self) -> None:
        if self._next < len(self.requests):
            self.clock.at(self.requests.arrival[self._next], self._arrival)

    def _arrival(self) -> None:
        request = self._next
        self._next += 1
        self._schedule_arrival()
        self.arrive(request)

    def kv_tokens(self, experts_on: int, tp: int = 1) -> float:
        """KV tokens of one attention group whose GPUs also hold 1/`experts_on` of the experts.

        Raises CannotServe when the weights leave no room, or when tokens say nothing of KV.
        """
        model = self.setting.model
        if not model.kv_bytes_per_token:
            raise CannotServe(
                f"{self.name}: KV is counted in tokens here, and no layer of {model.name} keeps KV "
                "per token; plan this model instead"
            )
        memory = self.setting.memory()
        beside = self.knobs.kv_reserve
        if experts_on:
            beside += float(memory.experts(float(experts_on)))
        tokens = memory.kv_tokens(tp, beside)
        if tokens < 1:
            raise CannotServe(
                f"{self.name}: weights leave no room for KV on {self.setting.gpu.name} "
                f"({beside / 1e9:.1f} GB of experts beside attention, "
                f"{memory.usable / 1e9:.1f} GB usable)"
            )
        return tokens
