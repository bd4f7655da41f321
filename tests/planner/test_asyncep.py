"""AsyncEP plans: more memory or faster links never hurt, and the reasons are the plan's own."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_expertplex.planner.asyncep import AsyncEPPlan, Comparison, plan_asyncep
from vllm_expertplex.planner.hardware import load_gpu
from vllm_expertplex.planner.setup import setting


def _compare(
    model: str = "minimax-m2.7",
    load: str = "4000/1",
    gpus: int = 8,
    ttft: float = 4.0,
    **gpu: float,
) -> Comparison:
    device = msgspec.structs.replace(load_gpu("h200"), **gpu)
    return plan_asyncep(setting(model, device, load, ttft, 0.05), gpus)


def _best(**changes: float) -> AsyncEPPlan:
    return _compare(**changes).plans[0]  # type: ignore[arg-type]


def test_every_division_of_the_gpus_that_fits_is_considered() -> None:
    found = _compare()
    assert all(plan.gpus * plan.copies == 8 for plan in found.plans)
    assert len({plan.gpus for plan in found.plans}) == len(found.plans)
    assert [plan.goodput for plan in found.plans] == sorted(
        (plan.goodput for plan in found.plans), reverse=True
    )


def test_nothing_resident_exceeds_the_gpu() -> None:
    for plan in _compare().plans:
        assert plan.resident_bytes <= 0.88 * 141e9
        assert plan.kv_tokens >= plan.step_tokens


def test_a_model_that_does_not_fit_one_gpu_is_offloaded() -> None:
    plans = {plan.gpus: plan for plan in _compare(ttft=60.0).plans}
    assert plans[1].offload_layers > 0
    assert plans[1].host_bytes > 200e9
    assert plans[8].offload_layers == 0


@settings(max_examples=15, deadline=None)
@given(st.floats(0.3, 1.0))
def test_a_slower_link_never_makes_gathers_easier_to_hide(share: float) -> None:
    fast, slow = _best(), _best(nvlink_bytes_per_s=450e9 * share)
    if fast.gpus == slow.gpus:
        assert slow.layer_s >= fast.layer_s
        assert slow.threshold_tokens >= fast.threshold_tokens
    assert slow.goodput <= fast.goodput * (1 + 1e-9)


def test_short_of_the_threshold_the_plan_says_so() -> None:
    tight = _compare(ttft=1.2).plans[0]
    loose = _compare(ttft=8.0).plans[0]
    assert loose.reaches_threshold
    assert any("hide the gather" in reason for reason in loose.reasons)
    assert tight.step_tokens < loose.step_tokens
    if not tight.reaches_threshold:
        assert any("below T" in reason for reason in tight.reasons)


def test_a_pass_takes_no_less_than_its_gathers() -> None:
    for plan in _compare().plans:
        layers = setting("minimax-m2.7", "h200", "4000/1", 4.0, 0.05).model.moe_layers
        assert plan.step_s >= plan.layer_s * layers
        assert 0 < plan.mfu < 0.62  # what GEMMs are assumed to reach


def test_loads_that_generate_are_left_to_expertplex() -> None:
    with pytest.raises(ValueError, match="every further token gathers all layers again"):
        _compare(load="4000/200")


def test_a_ttft_below_the_gathers_is_refused() -> None:
    with pytest.raises(ValueError, match="gather all layers and compute a prompt within"):
        _compare(ttft=0.01)


def test_a_prompt_without_room_is_named() -> None:
    with pytest.raises(ValueError, match=r"a prompt of 100000000 tokens.*shorter prompts"):
        _compare(load="100000000/1")


def test_the_verdict_names_the_better_executor() -> None:
    found = _compare()
    assert found.expertplex is not None
    better = "AsyncEP" if found.plans[0].goodput >= found.expertplex else "ExpertPlex"
    assert found.verdict.startswith(better)
