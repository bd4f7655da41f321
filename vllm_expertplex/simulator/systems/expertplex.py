"""ExpertPlex: separate prefill and decode servers that share MoE servers.

Owns: routing requests, KV transfer, contention for the MoE servers by eq. (4), failures, scaling.

Prefill servers run on their own; their operations share the MoE servers' SMs with each other and
with decode. Decode servers step together. While both phases have tiles, decode has its budget q'
and prefill the rest; alone, each has all SMs. A phase has tiles for the part of its iteration that
is MoE time.
"""

from collections import deque
from functools import partial

import numpy as np

from vllm_expertplex.layout import Layout
from vllm_expertplex.planner.plan import Plan
from vllm_expertplex.planner.setup import Setting
from vllm_expertplex.simulator.events import Clock
from vllm_expertplex.simulator.pools import DecodePool, PrefillQueue
from vllm_expertplex.simulator.requests import Requests
from vllm_expertplex.simulator.steps import Knobs, ModelSteps, Steps, Timing, Work
from vllm_expertplex.simulator.systems.base import CannotServe, System

IDLE = Timing(1.0, 0.0)
RESTART = 30.0  # seconds until a failed server is replaced: assumed


class _PrefillServer:
    """One prefill server: its queue, its running batch, and the KV it holds until moved."""

    def __init__(self, queue: PrefillQueue) -> None:
        self.queue = queue
        self.batch: list[int] = []
        self.work: Work | None = None
        self.timing = IDLE
        self.held = 0
        self.link_free = 0.0
        self.alive = True


class ExpertPlex(System):
    """`plan` gives layout, tensor parallelism and SM budget; `steps` replaces the latency model."""

    name = "expertplex"

    def __init__(
        self,
        setting: Setting,
        gpus: int,
        requests: Requests,
        knobs: Knobs,
        plan: Plan | None = None,
        steps: Steps | None = None,
    ) -> None:
        if plan is None:
            raise CannotServe("expertplex: no layout serves the load (see vllm-expertplex plan)")
        super().__init__(setting._replace(sharing=plan.sharing), gpus, requests, knobs)
        layout = Layout.parse(plan.layout)
        tp_p, tp_d = plan.prefill.tensor_parallel, plan.decode.tensor_parallel
        a = setting.assumptions
        self.steps: Steps = steps or ModelSteps(self.latency, layout.moe, tp_p, knobs=knobs)
        self.decode_steps: Steps = steps or ModelSteps(self.latency, layout.moe, tp_d, knobs=knobs)
        self.moe, self.plan, self.budget = layout.moe, plan, a.prefill_tokens
        self.prefill = [self._new_server() for _ in range(layout.prefill // tp_p)]
        self.prefill_kv = self.kv_tokens(0, tp_p)
        self.decode = DecodePool(
            requests, layout.decode // tp_d, self.kv_tokens(0, tp_d), a.decode_slots
        )
        self.ready: deque[tuple[int, _PrefillServer]] = deque()  # prefilled, not yet on a rank
        self.moved: list[int] = []  # KV on its decode rank, joins the next iteration
        self.stepping = False
        self.decode_timing = IDLE
        self.paused_until = 0.0
        self.lost = 0
        self._shares: dict[float, float] = {}

    def _new_server(self) -> _PrefillServer:
        a = self.setting.assumptions
        budget = max(self.budget, self._prefill_target())
        return _PrefillServer(PrefillQueue(self.requests, budget, a.max_prefill_requests))

    def _prefill_target(self) -> int:
        """Tokens of the planned prefill batch of one server."""
        p = self.plan.prefill
        each = -(-p.batch * p.tensor_parallel // p.gpus)
        return int(each * self.setting.workload.mean_input)

    def arrive(self, request: int) -> None:
        need = self.decode.need(request)
        if need > self.decode.capacity or self.requests.inputs[request] > self.prefill_kv:
            self.refuse(request)
            return
        alive = [server for server in self.prefill if server.alive]
        server = min(alive, key=lambda s: s.queue.tokens + (s.work.tokens if s.work else 0.0))
        server.queue.add(request)
        self._start_prefill(server)

    # prefill

    def _start_prefill(self, server: _PrefillServer) -> None:
        if server.work or not server.alive or not server.queue.waiting:
            return
        server.batch, work = server.queue.take(self.prefill_kv - server.held)
        if not server.batch:
            return  # its KV is full of requests that decode has no room for: prefill stalls
        server.work = work
        server.held += int(work.tokens)
        running = sum(s.work.tokens for s in self.prefill if s.work)
        share = 1.0 - self._decode_share() * self._decode_duty()
        decoding = float(self.decode.running) if self.stepping else 0.0
        server.timing = self.steps.prefill(work, running, share, decoding)
        delay = max(0.0, self.paused_until - self.clock.now) + server.timing.total
        self.clock.after(delay, lambda: self._end_prefill(server, server.batch))

    def _end_prefill(self, server: _PrefillServer, batch: list[int]) -> None:
        if not server.alive or server.batch is not batch:
            return  # the server died meanwhile
        server.batch, server.work, server.timing = [], None, IDLE
        for request in batch:
            if self.first_token(request):
                server.held -= self.requests.inputs[request]
            else:
                self.ready.append((request, server))
        self._move_kv()
        self._start_prefill(server)

    def _move_kv(self) -> None:
        """Reserve decode ranks, first come first served, and send KV over the prefill links."""
        while self.ready:
            request, server = self.ready[0]
            rank = self.decode.place(request)
            if rank is None:
                return
            self.ready.popleft()
            self.decode.reserve(request, rank)
            size = float(self.latency.network.kv_transfer(self.requests.inputs[request]))
            server.link_free = max(server.link_free, self.clock.now) + size
            iteration = self.decode_timing.total if self.stepping else 0.0
            there = server.link_free + self.decode_steps.handoff(iteration)
            self.clock.at(there, partial(self._kv_moved, request, server, rank))

    def _kv_moved(self, request: int, server: _PrefillServer, rank: int) -> None:
        server.held -= self.requests.inputs[request]
        if self.decode.alive[rank]:
            self.moved.append(request)
        self._start_prefill(server)
        self._start_decode()

    # decode

    def _start_decode(self) -> None:
        if self.stepping:
            return
        for request in self.moved:
            self.decode.start(request)
        self.moved.clear()
        if not self.decode.running:
            self.decode_timing = IDLE
            return
        self.stepping = True
        each, batch, length = self.decode.shape()
        alone = self.decode_steps.decode(each, batch, length, 1.0)
        duty = self._prefill_duty()
        timing = alone
        if duty:
            beside = self.decode_steps.decode(each, batch, length, self._decode_share(batch))
            timing = Timing(
                alone.total + duty * (beside.total - alone.total),
                alone.moe + duty * (beside.moe - alone.moe),
            )
        self.decode_timing = timing
        delay = max(0.0, self.paused_until - self.clock.now) + timing.total
        self.clock.after(delay, self._end_decode)

    def _end_decode(self) -> None:
        self.stepping = False
        if self.decode.advance(self.clock.now) or self.ready:
            self._move_kv()
        self._start_decode()

    # contention

    def _prefill_duty(self) -> float:
        """Part of the time that prefill has tiles on the MoE servers."""
        return min(1.0, sum(s.timing.moe / s.timing.total for s in self.prefill if s.work))

    def _decode_duty(self) -> float:
        return min(1.0, self.decode_timing.moe / self.decode_timing.total) if self.stepping else 0.0

    def _decode_share(self, batch: float | None = None) -> float:
        """Decode's SM share under contention: eq. (4), at most the budgets the plan may use."""
        now = self.decode.running if batch is None else batch
        key = round(max(float(now), 1.0), -1 if now > 64 else 0)
        if key not in self._shares:
            sms, step = float(self.latency.moe_sms), self.setting.assumptions.sm_step
            expected = max(1.0, float(self.plan.decode.batch))
            planned = float(self.plan.decode_sms)
            q = self.latency.decode_budget(planned, key, self.moe, expected, sms - step)
            self._shares[key] = q / sms
        return self._shares[key]

    # failures and scaling

    def fail(self, role: str, restart: float) -> None:
        """Lose one server: its requests start again. A MoE server stops everything for `restart`.

        An attention server is replaced after `restart` seconds.
        """
        if role == "moe":
            self.paused_until = self.clock.now + restart
            return
        if role == "prefill":
            server = next(s for s in self.prefill if s.alive)
            if sum(s.alive for s in self.prefill) == 1:
                raise ValueError("the last prefill server cannot fail in a simulation")
            server.alive = False
            lost = server.batch + server.queue.drain()
            lost += [r for r, s in self.ready if s is server]
            self.ready = deque((r, s) for r, s in self.ready if s is not server)
        else:
            if self.decode.alive.sum() == 1:
                raise ValueError("the last decode server cannot fail in a simulation")
            rank = int(np.argmax(self.decode.alive))
            lost = self.decode.lose_rank(rank)
            self.moved = [r for r in self.moved if r not in set(lost)]
        self.lost += len(lost)
        for request in lost:
            self.arrive(request)
        self.clock.after(restart, lambda: self.add(role))

    def add(self, role: str) -> None:
        """Attach one attention server."""
        if role == "prefill":
            self.prefill.append(self._new_server())
        elif role == "decode":
            self.decode.add_rank()
            self._move_kv()
        else:
            raise ValueError("MoE servers cannot be added at run time: experts are placed at start")


def schedule(system: ExpertPlex, clock: Clock, events: list[tuple[float, str, str]]) -> None:
    """Put (time, 'fail' or 'add', role) events on the clock."""
    if system.plan.sharing and any(action == "add" for _, action, _ in events):
        raise ValueError(
            f"an added server: {system.plan.layout} shares its {system.gpus} GPUs, which have no "
            "SMs for another; leave the event out, or plan another layout"
        )
    for time, action, role in events:
        if action == "fail":
            clock.at(time, partial(system.fail, role, RESTART))
        else:
            clock.at(time, partial(system.add, role))
