"""T from what engines measured: a batch of T takes gamma times as long as a gather."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_expertplex.asyncep.flops import Flops
from vllm_expertplex.asyncep.speed import Speed
from vllm_expertplex.asyncep.threshold import Threshold
from vllm_expertplex.planner.model_configs import load_model

_MODEL = load_model("qwen3-235b-a22b")
_FLOPS = Flops(_MODEL)
_SECONDS = st.floats(1e-4, 10)
_SPEEDS = st.lists(
    st.builds(Speed, _SECONDS, _SECONDS, st.integers(256, 65536)), min_size=1, max_size=5
)


@given(_SPEEDS, st.floats(1, 3))
def test_a_batch_of_t_covers_the_slowest_gather(speeds: list[Speed], gamma: float) -> None:
    threshold = Threshold.of(speeds, _FLOPS, _MODEL.moe_layers, gamma)
    tokens = _FLOPS.tokens_for(threshold.flops)
    slowest = max(speed.gather_s for speed in speeds)
    # On the engine that takes longest per token, T tokens take gamma gathers per layer.
    per_token = max(speed.pass_s / speed.tokens for speed in speeds) / _MODEL.moe_layers
    assert tokens * per_token == pytest.approx(gamma * slowest, rel=1e-3)


def test_an_engine_that_gathers_nothing_has_no_threshold() -> None:
    assert Threshold.of([Speed(0.0, 0.0, 0)], _FLOPS, _MODEL.moe_layers, 1.2).flops == 0
