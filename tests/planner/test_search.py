"""Algorithm 1: the two searches agree, batches are the largest, the paper's layouts come out."""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_expertplex.layout import Layout
from vllm_expertplex.planner.assumptions import Assumptions
from vllm_expertplex.planner.rates import between, largest_that
from vllm_expertplex.planner.search import (
    all_layouts,
    fixed_layout,
    search,
    search_exhaustive,
)
from vllm_expertplex.planner.setup import setting


@pytest.mark.parametrize(
    ("model", "gpus", "workload", "ttft", "tpot", "layout"),
    [
        ("minimax-m2.7", 8, "sharegpt", 1, 0.05, "1P3D4E"),
        ("minimax-m2.7", 8, "long-input", 10, 0.1, "3P1D4E"),
        ("glm-5.1-fp8", 24, "sharegpt", 2, 0.1, "3P6D15E"),
        ("glm-5.1-fp8", 24, "long-input", 20, 0.1, "6P3D15E"),
    ],
)
def test_the_papers_layouts_on_80_gb_h800(model, gpus, workload, ttft, tpot, layout) -> None:
    given_ = setting(model, "h800", workload, ttft, tpot)
    best = search(given_.problem(gpus), given_.space(gpus))
    assert best is not None
    assert best.layout == layout


@given(
    model=st.sampled_from(
        ["minimax-m2.7", "qwen3-30b-a3b-fp8", "gpt-oss-120b", "olmoe-1b-7b-0924"]
    ),
    gpu=st.sampled_from(["h800", "h200", "b200"]),
    gpus=st.integers(3, 16),
    inputs=st.integers(16, 30_000),
    outputs=st.integers(1, 2000),
    ttft=st.floats(0.1, 20),
    tpot=st.floats(0.01, 0.2),
    buffers=st.sampled_from(["worst", "average"]),
    prefill_tokens=st.sampled_from([512, 8192]),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_fast_search_finds_the_exhaustive_optimum(
    model, gpu, gpus, inputs, outputs, ttft, tpot, buffers, prefill_tokens
) -> None:
    assume = Assumptions(buffers=buffers, sm_step=44, prefill_tokens=prefill_tokens)
    given_ = setting(model, gpu, f"{inputs}/{outputs}", ttft, tpot, assume)
    problem, space = given_.problem(gpus), given_.space(gpus, "free")
    fast, exact = search(problem, space), search_exhaustive(problem, space)
    assert (fast is None) == (exact is None)
    if fast is not None and exact is not None:
        assert fast.goodput == pytest.approx(exact.goodput, rel=1e-9)


@pytest.mark.parametrize(("gpus", "placement"), [(24, "free"), (24, "alike"), (64, "free")])
def test_the_searches_agree_on_many_gpus(gpus: int, placement: str) -> None:
    given_ = setting("glm-5.1-fp8", "h800", "sharegpt", 2, 0.1, Assumptions(sm_step=60))
    problem, space = given_.problem(gpus), given_.space(gpus, placement)
    fast, exact = search(problem, space), search_exhaustive(problem, space)
    assert fast is not None
    assert exact is not None
    assert fast.goodput == pytest.approx(exact.goodput, rel=1e-9)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(0, 60))
def test_bisection_finds_the_largest_that_fits(most: list[int], limit: int) -> None:
    high = np.array(most, dtype=float)
    found = largest_that(lambda n: n <= limit, high)
    assert found.tolist() == [min(m, limit) for m in most]


@given(st.integers(0, 20), st.integers(0, 20), st.integers(-5, 30))
def test_between_never_falls_below_its_low_end(low: int, more: int, limit: int) -> None:
    found = between(lambda n: n <= limit, np.array([low]), np.array([low + more]))
    assert found.tolist() == [max(low, min(low + more, limit))]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_batches_are_the_best_of_all_feasible_ones(phase: str) -> None:
    given_ = setting("minimax-m2.7", "h200", "2000/200", 2, 0.05)
    problem = given_.problem(8)
    gpus, moe, q = np.array([3]), np.array([4]), np.array([48])
    rate = getattr(problem, f"{phase}_rate")(gpus, moe, q, 1)
    parts = getattr(problem, f"{phase}_parts")
    limit = getattr(problem, f"{phase}_limit")
    best = 0.0
    for overlap in problem.latency.overlaps:
        for batch in range(1, 900):
            seconds = float(parts(np.array([float(batch)]), gpus, moe, q, 1, overlap).total[0])
            cap = 3 * (64 if phase == "prefill" else 256)
            if seconds <= limit and batch <= cap:
                best = max(best, batch / seconds)
    best /= 200 if phase == "decode" else 1
    assert rate.rate[0] == pytest.approx(best, rel=1e-9)


def test_a_fixed_layout_is_planned_as_in_the_list_of_all() -> None:
    given_ = setting("minimax-m2.7", "h800", "sharegpt", 1, 0.05)
    problem, space = given_.problem(8), given_.space(8)
    for candidate in all_layouts(problem, space)[:4]:
        fixed = fixed_layout(problem, space, Layout.parse(candidate.layout))
        assert fixed is not None
        assert fixed.goodput == pytest.approx(candidate.goodput)


def test_layouts_never_use_more_gpus_than_there_are() -> None:
    given_ = setting("minimax-m2.7", "h200", "sharegpt", 1, 0.05)
    for c in all_layouts(given_.problem(11), given_.space(11)):
        assert c.prefill + c.decode + c.moe <= 11
        assert c.prefill % c.tp_prefill == 0
        assert c.decode % c.tp_decode == 0


def test_tensor_parallelism_divides_the_heads(tmp_path) -> None:
    """Four heads cannot be shared by eight GPUs, though that alone would keep the target."""
    config = {
        "hidden_size": 4096, "intermediate_size": 512, "vocab_size": 1024, "num_hidden_layers": 4,
        "num_attention_heads": 4, "head_dim": 256, "num_local_experts": 16,
        "num_experts_per_tok": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    four = setting(str(tmp_path), "h100", "400000/2", 1.6, 1)
    assert search(four.problem(24), four.space(24, "free")._replace(tp=(1, 2, 4, 8))) is not None
    assert search(four.problem(24), four.space(24, "free")) is None
    assert four.space(24).tp == (1, 2, 4)
    assert setting("minimax-m2.7", "h100", "400/200", 1, 1).space(8).tp == (1, 2, 4, 8)
