"""A prompt's work does not depend on where it is cut, and is what the paper's formulas say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_expertplex.asyncep.flops import Flops
from vllm_expertplex.planner.model_catalogue import CATALOGUE
from vllm_expertplex.planner.model_configs import load_model

_MODELS = st.sampled_from(sorted(CATALOGUE)).map(lambda name: Flops(load_model(name)))
_TOKENS = st.integers(0, 200_000)


@given(_MODELS, _TOKENS, _TOKENS, _TOKENS)
def test_two_parts_cost_what_the_whole_costs(flops: Flops, cached: int, a: int, b: int) -> None:
    whole = flops.new(a + b, cached)
    assert flops.new(a, cached) + flops.new(b, cached + a) == pytest.approx(whole, rel=1e-6)


@given(_MODELS, _TOKENS, _TOKENS, st.integers(1, 1000))
def test_more_tokens_or_a_shorter_cached_prefix_never_cost_less(
    flops: Flops, tokens: int, cached: int, more: int
) -> None:
    assert flops.new(tokens + more, cached) > flops.new(tokens, cached)
    total = tokens + cached
    assert flops.new(total, 0) >= flops.new(tokens, cached) * (1 - 1e-9)


@given(st.integers(1, 100_000), st.integers(0, 100_000), st.integers(1, 10_000))
def test_grouped_query_attention_follows_the_paper(prefix: int, cached: int, suffix: int) -> None:
    """Delta_r = C_pfx(P - M | M) + C_sfx(S, P) with C_self = 2 n d S^2 and C_cross = 4 n d S P."""
    model = load_model("qwen3-235b-a22b")
    (attention,) = model.attention
    width = attention.heads * attention.head_dim
    flops = Flops(model)
    cached = min(cached, prefix)

    def part(new: int, before: int) -> float:
        return flops.per_token * new + 2.0 * width * new**2 + 4.0 * width * new * before

    delta = part(prefix - cached, cached) + part(suffix, prefix)
    assert flops.new(prefix - cached + suffix, cached) == pytest.approx(delta, rel=1e-9)


def test_qwen3_235b_reads_22_billion_parameters_a_token() -> None:
    model = load_model("qwen3-235b-a22b")
    assert Flops(model).per_token * model.moe_layers == pytest.approx(2 * 22e9, rel=0.07)


def test_negative_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="expected both >= 0"):
        Flops(load_model("qwen3-235b-a22b")).new(-1)
