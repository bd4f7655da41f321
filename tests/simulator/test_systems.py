"""Every serving mode: requests are conserved, load hurts, runs repeat, refusals are clear."""

import numpy as np
import pytest

from vllm_expertplex.planner.assumptions import Assumptions
from vllm_expertplex.planner.cli import find_plan
from vllm_expertplex.planner.setup import setting
from vllm_expertplex.simulator.metrics import estimate
from vllm_expertplex.simulator.requests import Requests, poisson
from vllm_expertplex.simulator.runs import Case, goodput, simulate
from vllm_expertplex.simulator.steps import Knobs, ModelSteps, Work
from vllm_expertplex.simulator.systems import SYSTEMS, build
from vllm_expertplex.simulator.systems.base import CannotServe
from vllm_expertplex.simulator.systems.expertplex import ExpertPlex

MODES = [m for m in SYSTEMS if m != "asyncep"]


def case(m2, mode: str, **changes: object) -> Case:
    given, plan = m2
    options = {"plan": plan} if mode == "expertplex" else {}
    return Case(setting=given, gpus=8, mode=mode, options=options, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", MODES)
def test_every_request_ends_once_and_in_order(m2, mode: str) -> None:
    given, plan = m2
    requests = poisson(given.workload, 15.0, 300, seed=1)
    options = {"plan": plan} if mode == "expertplex" else {}
    build(mode, given, 8, requests, Knobs(), **options).run(1e6)
    arrival, first, finish = (
        np.asarray(v) for v in (requests.arrival, requests.first, requests.finish)
    )
    assert np.isfinite(finish).all()
    assert (first > arrival).all()
    assert (finish >= first).all()
    assert (
        finish[np.asarray(requests.outputs) > 1] > first[np.asarray(requests.outputs) > 1]
    ).all()


@pytest.mark.parametrize("mode", MODES)
def test_more_load_never_serves_better(m2, mode: str) -> None:
    light, heavy = (simulate(case(m2, mode), rate, 0) for rate in (2.0, 400.0))
    assert light.attained == 1.0
    assert heavy.attained < 0.5
    assert heavy.ttft_p90 > light.ttft_p90


@pytest.mark.parametrize("mode", MODES)
def test_the_same_seed_repeats_and_another_does_not(m2, mode: str) -> None:
    one, same, other = (simulate(case(m2, mode), 10.0, seed, 200) for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_goodput_is_where_ninety_percent_ends(m2) -> None:
    found = goodput(case(m2, "pdd"), 2, guess=10.0)
    assert simulate(case(m2, "pdd"), found.values[0], 0).attained >= 0.9
    assert simulate(case(m2, "pdd"), found.values[0] * 1.05, 0).attained < 0.9
    assert found.half_width >= 0.02 * found.mean


@pytest.mark.slow
def test_goodput_does_not_depend_on_the_guess(m2) -> None:
    near, far = (goodput(case(m2, "chunked"), 1, guess=g).mean for g in (60.0, 5.0))
    assert near == pytest.approx(far, rel=0.08)


def test_the_planners_rate_is_near_what_its_layout_serves(m2) -> None:
    """Two views of one model: Algorithm 1 and the queueing simulation agree within 40 %."""
    _, plan = m2
    found = goodput(case(m2, "expertplex"), 1, guess=plan.goodput)
    assert 0.6 < found.mean / plan.goodput < 1.4


def test_failures_lose_no_request_and_cost_latency(m2) -> None:
    runs = {}
    for name, events in (
        ("none", []),
        ("decode", [(3.0, "fail", "decode")]),
        ("moe", [(3.0, "fail", "moe")]),
    ):
        runs[name] = simulate(case(m2, "expertplex", events=events), 20.0, 0, 400)
        assert runs[name].finished == 1.0
    assert runs["moe"].ttft_p90 > 5 * runs["none"].ttft_p90
    assert runs["decode"].attained < runs["none"].attained


def test_an_added_prefill_server_shortens_the_queue() -> None:
    given = setting("minimax-m2.7", "h800", "long-input", 10, 0.1)
    plan = find_plan(given, 8)
    cases = [
        Case(setting=given, gpus=8, mode="expertplex", options={"plan": plan}, events=events)
        for events in ([], [(0.0, "add", "prefill"), (0.0, "add", "prefill")])
    ]
    before, after = (simulate(c, 4.0, 0, 300) for c in cases)
    assert after.ttft_p50 < before.ttft_p50


def test_events_are_for_expertplex_only(m2) -> None:
    with pytest.raises(ValueError, match="for expertplex"):
        simulate(case(m2, "pdd", events=[(1.0, "fail", "decode")]), 5.0, 0, 50)


def test_one_oversized_request_is_refused_and_counted(m2) -> None:
    given, plan = m2
    requests = Requests(np.array([0.0, 0.1]), np.array([10**7, 100]), np.array([10, 10]))
    ExpertPlex(given, 8, requests, Knobs(), plan=plan).run(1e4)
    assert requests.refused == 1
    assert np.isfinite(requests.finish[1])
    assert not np.isfinite(requests.finish[0])


def test_a_model_that_does_not_fit_beside_attention_is_refused() -> None:
    given = setting("glm-5.1-fp8", "h800", "sharegpt", 2, 0.1)
    with pytest.raises(CannotServe, match="no room for KV"):
        simulate(Case(setting=given, gpus=16, mode="pdd"), 1.0, 0, 50)


def test_shared_gpus_serve_no_better_than_gpus_of_their_own() -> None:
    given = setting("qwen3-30b-a3b-fp8", "h200", "400/100", 1, 0.05)
    shared = find_plan(given, 2, layout="1P1D2E")
    assert shared.sharing is not None
    both = []
    for plan, gpus in ((shared, 2), (find_plan(given, 4, layout="1P1D2E"), 4)):
        case_ = Case(setting=given, gpus=gpus, mode="expertplex", options={"plan": plan})
        both.append(simulate(case_, 20.0, 0, 300))
    assert both[0].finished == both[1].finished == 1.0
    assert both[0].ttft_p50 > both[1].ttft_p50
    assert both[0].tpot_p50 > both[1].tpot_p50
    system = build("expertplex", given, 2, poisson(given.workload, 1, 5, 0), Knobs(), plan=shared)
    own = given.memory().kv_tokens(1)
    assert 0 < system.decode.capacity < own  # type: ignore[attr-defined]


def test_no_server_is_added_to_shared_gpus() -> None:
    given = setting("qwen3-30b-a3b-fp8", "h200", "400/100", 1, 0.05)
    case_ = Case(
        setting=given, gpus=2, mode="expertplex", options={"plan": find_plan(given, 2)},
        events=[(0.0, "add", "prefill")],
    )  # fmt: skip
    with pytest.raises(ValueError, match="SMs for another"):
        simulate(case_, 5.0, 0, 50)


def test_asyncep_serves_prefill_only_loads() -> None:
    given = setting("minimax-m2.7", "h200", "1000/1", 5, 0.05)
    done = simulate(Case(setting=given, gpus=8, mode="asyncep"), 50.0, 0, 400)
    assert done.finished == 1.0
    chat = setting("minimax-m2.7", "h200", "1000/100", 5, 0.05)
    with pytest.raises(CannotServe, match="prefill-only"):
        simulate(Case(setting=chat, gpus=8, mode="asyncep"), 50.0, 0, 50)


def test_decode_slows_while_prefill_shares_the_moe_servers(m2) -> None:
    given, _ = m2
    steps = ModelSteps(given.latency(8), 4)
    assert steps.decode(100, 300, 500, 0.3).total > steps.decode(100, 300, 500, 1.0).total
    work = Work(8192.0, 8192.0 * 400)
    assert steps.prefill(work, 8192.0, 0.5).total > steps.prefill(work, 8192.0, 1.0).total


def test_knobs_add_exactly_what_they_say(m2) -> None:
    given, _ = m2
    plain = ModelSteps(given.latency(8), 4).decode(50, 150, 500, 1.0).total
    slower = ModelSteps(given.latency(8), 4, knobs=Knobs(decode_layer=1e-4))
    assert slower.decode(50, 150, 500, 1.0).total == pytest.approx(plain + 62 * 1e-4)


def test_a_larger_kv_reserve_never_raises_capacity(m2) -> None:
    given, _ = m2
    requests = poisson(given.workload, 1.0, 5, 0)
    full = build("pdd", given, 8, requests, Knobs())
    less = build("pdd", given, 8, requests, Knobs(kv_reserve=2e9))
    assert less.decode.capacity < full.decode.capacity  # type: ignore[attr-defined]


def test_confidence_intervals() -> None:
    assert estimate([2.0, 2.0, 2.0]).half_width == 0
    known = estimate([1.0, 2.0, 3.0])
    assert known.mean == 2.0
    assert known.half_width == pytest.approx(4.303 / np.sqrt(3), rel=1e-3)
    with pytest.raises(ValueError, match="expected 1 to 10"):
        estimate([])


def test_an_unknown_mode_is_named(m2) -> None:
    with pytest.raises(ValueError, match="expected one of expertplex"):
        build("magic", m2[0], 8, poisson(m2[0].workload, 1.0, 5, 0), Knobs())


def test_tensor_parallel_attention_is_refused_where_heads_run_out(m2) -> None:
    requests = poisson(m2[0].workload, 5.0, 20, seed=0)
    with pytest.raises(CannotServe, match="64 cannot share 48 heads"):
        build("green-context", m2[0], 64, requests, Knobs())


@pytest.mark.parametrize("mode", ["colocated", "chunked"])
def test_a_tensor_parallel_group_is_one_rank_that_divides_a_prompt(mode: str) -> None:
    given = setting("minimax-m2.7", "h200", "sharegpt", 1, 0.05)
    alone, grouped = (Requests(np.zeros(1), np.array([8000]), np.array([2])) for _ in range(2))
    build(mode, given, 2, alone, Knobs()).run(1e6)
    system = build(mode, given, 2, grouped, Knobs(), tp=2)
    system.run(1e6)
    assert len(system.pool.count) == 1  # type: ignore[attr-defined]
    assert grouped.ttft[0] < alone.ttft[0]
    with pytest.raises(CannotServe, match="2 GPUs are no whole groups of 4"):
        build(mode, given, 2, grouped, Knobs(), tp=4)


def test_a_mixed_iteration_pays_for_its_all_reduces() -> None:
    totals = []
    for floor in (0.0, 1e-3):
        assumed = Assumptions(allreduce_floor=floor)
        given = setting("minimax-m2.7", "h200", "sharegpt", 1, 0.05, assumed)
        steps = ModelSteps(given.latency(2), 2, tp=2)
        totals.append(steps.mixed(Work(512, 512**2), 4, 600, 512, 4).total)
    assert totals[1] - totals[0] == pytest.approx(62 * 1e-3)
