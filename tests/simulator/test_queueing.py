"""The event loop against queueing theory, with iteration times that are simply given."""

import numpy as np
import pytest

from vllm_expertplex.planner.workload import Workload
from vllm_expertplex.simulator.events import Clock
from vllm_expertplex.simulator.requests import Requests, poisson
from vllm_expertplex.simulator.steps import Knobs, Timing
from vllm_expertplex.simulator.systems.expertplex import ExpertPlex


class Constant:
    """Every prefill and decode iteration takes the same time."""

    def __init__(self, prefill: float, decode: float, handoff: float = 0.0) -> None:
        self.prefill_time, self.decode_time, self.handoff_time = prefill, decode, handoff

    def prefill(self, work, tokens, sms, beside=0.0):
        return Timing(self.prefill_time, 0.0)

    def decode(self, each, batch, length, sms):
        return Timing(self.decode_time, 0.0)

    def handoff(self, iteration):
        return 0.0 if iteration else self.handoff_time


def system(m2, requests, steps) -> ExpertPlex:
    given, plan = m2
    built = ExpertPlex(given, 8, requests, Knobs(), plan=plan, steps=steps)
    for server in built.prefill:
        server.queue.most = 1  # one prompt at a time: a plain queue
    return built


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_prefill_waits_like_an_m_d_1_queue(m2, load: float) -> None:
    """One server, constant service: mean wait = load x service / (2 (1 - load))."""
    service, count = 0.1, 40_000
    ones = Workload(name="ones", mean_input=1, mean_output=1)
    requests = poisson(ones, load / service, count, seed=3)
    system(m2, requests, Constant(service, 1.0)).run(1e9)
    wait = float(np.mean(requests.ttft)) - service
    assert wait == pytest.approx(load * service / (2 * (1 - load)), rel=0.08)


@pytest.mark.parametrize("handoff", [0.0, 0.1])
def test_a_lone_request_takes_the_sum_of_its_iterations(m2, handoff: float) -> None:
    requests = Requests(np.array([5.0]), np.array([100]), np.array([11]))
    built = system(m2, requests, Constant(0.25, 0.02, handoff))
    built.run(100.0)
    moved = float(built.latency.network.kv_transfer(100)) + handoff
    assert requests.ttft[0] == pytest.approx(0.25)
    assert requests.finish[0] == pytest.approx(5.25 + moved + 10 * 0.02)
    assert requests.tpot[0] == pytest.approx((moved + 10 * 0.02) / 10)


def test_decode_steps_are_shared_by_all_running_requests(m2) -> None:
    count = 50
    requests = Requests(np.zeros(count), np.full(count, 10), np.full(count, 101))
    built = system(m2, requests, Constant(0.0, 0.02))
    built.run(1e6)
    assert np.max(requests.finish) < 101 * 0.02 + 0.1  # not 50 times as long


def test_the_clock_runs_in_order_and_never_back() -> None:
    clock, seen = Clock(), []
    clock.at(2.0, lambda: seen.append(2))
    clock.at(1.0, lambda: clock.after(0.5, lambda: seen.append(1)))
    while clock.step():
        pass
    assert seen == [1, 2]
    with pytest.raises(ValueError, match="in the past"):
        clock.at(0.5, lambda: None)
