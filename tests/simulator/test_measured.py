"""Iteration times that were measured elsewhere."""

import pytest

from vllm_expertplex.planner.profile import Fit
from vllm_expertplex.simulator.measured import MeasuredSteps
from vllm_expertplex.simulator.steps import NOTHING


def fit(*coefficients: float) -> Fit:
    return Fit(
        terms=("1", "x", "x s"), coefficients=coefficients, points=9,
        held_out_points=3, held_out_mean_error=0.0, held_out_max_error=0.0,
    )  # fmt: skip


def test_times_follow_the_fits_and_the_other_phase() -> None:
    steps = MeasuredSteps(
        fit(0.01, 1e-3, 0.0), fit(0.02, 1e-3, 1e-6), ((2.0, 1.0), (6.0, 2.0)), ((1.0, 2.0),),
        handoff_s=0.01, handoff_iterations=2.0,
    )  # fmt: skip
    work = NOTHING.plus(0, 100).plus(0, 50)
    assert steps.prefill(work, 150, 1.0).total == pytest.approx(0.16)
    assert steps.prefill(work, 150, 0.6, 4.0).total == pytest.approx(0.32)
    assert steps.decode(4, 4, 200, 1.0).total == pytest.approx(0.02 + 4e-3 + 8e-4)
    assert steps.decode(4, 4, 200, 0.5).total == pytest.approx(1.5 * (0.02 + 4e-3 + 8e-4))
    assert steps.decode(8, 8, 0, 0.5).total == pytest.approx(2.0 * (0.02 + 8e-3))
    assert steps.handoff(0.0) == pytest.approx(0.01)
    assert steps.handoff(0.1) == pytest.approx(0.21)
