"""How servers that share GPUs divide their memory, for any layout, number of GPUs and size."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_expertplex.layout import Layout
from vllm_expertplex.quantization import QuantScheme
from vllm_expertplex.serve import gpu_memory
from vllm_expertplex.serve.gpu_memory import attention_shares
from vllm_expertplex.serve.placement import place

counts = st.integers(1, 5)
GIB = 2**30


@given(
    st.builds(Layout, counts, counts, counts),
    st.integers(2, 12),
    st.integers(1, 2),
    st.floats(0.01, 0.3),
    st.floats(0.05, 1.0),
)
def test_no_gpu_is_promised_more_than_it_may_give(
    layout: Layout, gpus: int, ranks: int, moe_part: float, utilization: float
) -> None:
    places = place(layout, [f"gpu{n}" for n in range(gpus)], 60, 60, ranks)
    try:
        shares = attention_shares(layout, places, moe_part, utilization)
    except ValueError:
        held = Counter(places[s.name].gpu for s in layout.moe_servers)
        assert max(held.values()) * moe_part >= utilization
        return
    assert set(shares) == {s.name for s in layout.attention_servers}
    taken: Counter[str] = Counter()
    for name, where in places.items():
        for gpu in where.gpus:
            taken[gpu] += shares.get(name, moe_part)
    shared = {gpu for s in layout.attention_servers for gpu in places[s.name].gpus}
    assert max(taken[gpu] for gpu in shared) == pytest.approx(utilization)
    if gpus >= layout.moe + ranks:  # nothing but attention there
        most = max(Counter(places[s.name].gpu for s in layout.attention_servers).values())
        assert min(shares.values()) == pytest.approx(utilization / most)


def test_experts_that_fill_the_gpu_are_named() -> None:
    places = place(Layout(1, 1, 2), ["7"], 60, 60)
    with pytest.raises(
        ValueError, match=r"GPU 7 is to hold 2 .* need 50% .*utilization 0\.9.*GPUs"
    ):
        attention_shares(Layout(1, 1, 2), places, 0.5, 0.9)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_moe_server_needs_its_experts_and_a_little_more(
    monkeypatch: pytest.MonkeyPatch, fp8: bool
) -> None:
    scheme = QuantScheme.FP8_BLOCK if fp8 else QuantScheme.NONE
    monkeypatch.setattr(gpu_memory, "quant_scheme", lambda config: scheme)
    text = SimpleNamespace(
        num_hidden_layers=50,
        first_k_dense_replace=2,
        moe_intermediate_size=768,
        intermediate_size=6144,
    )
    model = SimpleNamespace(
        hf_text_config=text,
        dtype=torch.bfloat16,
        get_hidden_size=lambda: 2048,
        get_num_experts=lambda: 128,
    )

    def needed(layout: Layout) -> float:
        return gpu_memory.moe_bytes(SimpleNamespace(model_config=model), layout) / GIB

    expert = 3 * 2048 * 768 * 48 * (1 if fp8 else 2) / GIB
    assert 128 * expert < needed(Layout(1, 1, 1)) < 128 * expert + 8
    assert 43 * expert < needed(Layout(1, 1, 3)) < 43 * expert + 8
    del text.moe_intermediate_size  # MiniMax-M2's name for it is the other
    assert 8 * 128 * expert < needed(Layout(1, 1, 1)) < 8 * 128 * expert + 8
