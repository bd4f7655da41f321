"""The latency model: overlap, eq. (4), and agreement with published kernel times."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_expertplex.planner.latency import SBO, TBO, overlapped
from vllm_expertplex.planner.routing import MoeLoad
from vllm_expertplex.planner.setup import setting

M2 = setting("minimax-m2.7", "h800", "sharegpt", 1, 0.05)
GLM = setting("glm-5.1-fp8", "h800", "sharegpt", 2, 0.1)
E4 = np.array([4])


def test_eight_active_experts_take_what_the_paper_reports() -> None:
    """EP4 decode with 8 active experts: 17.7 + 34.7 us (without APK overhead)."""
    load = MoeLoad(np.array([8.0]), np.array([8.0]), np.array([8.0]))
    whole = M2.kernels.routed_experts("decode", load, 1.0)[0] / 62
    without = (whole - 10e-6) / 1.10 + 10e-6
    assert without == pytest.approx(52.4e-6, rel=0.02)


def test_sixteen_thousand_tokens_take_what_the_paper_reports() -> None:
    """EP4 prefill, 16K tokens, 1.8 + 2.9 ms for both grouped GEMMs: 1024 full tiles of 128 rows."""
    load = MoeLoad(np.array([1024.0]), np.array([64.0]), np.array([0.0]))
    whole = M2.kernels.routed_experts("prefill", load, 1.0)[0] / 62
    assert (whole - 10e-6) / 1.12 == pytest.approx(4.7e-3, rel=0.10)


def test_overlap_modes() -> None:
    assert overlapped("none", 3.0, 1.0, 2.0, 5.0, 0.5).total == 11.5
    assert overlapped(SBO, 3.0, 1.0, 2.0, 5.0, 0.5).total == 10.5
    assert overlapped(TBO, 3.0, 1.0, 2.0, 5.0, 0.5).total == 7.5


@given(
    batch=st.integers(1, 2000),
    length=st.integers(1, 50_000),
    sources=st.integers(1, 16),
    share=st.floats(0.1, 0.9),
)
@settings(max_examples=60, deadline=None)
def test_iterations_grow_with_batch_and_shrink_with_sms(batch, length, sources, share) -> None:
    latency = GLM.latency(24)
    moe = np.array([15])

    def decode(b: float, s: float, q: float) -> float:
        return float(latency.decode(b, s, sources, moe, q).total[0])

    assert decode(batch + 1, length, share) >= decode(batch, length, share)
    assert decode(batch, length + 100, share) >= decode(batch, length, share)
    assert decode(batch, length, share + 0.1) <= decode(batch, length, share)


@given(st.integers(1, 3000), st.integers(1, 131))
@settings(max_examples=60, deadline=None)
def test_the_sm_budget_of_equation_4(batch: int, q: int) -> None:
    latency = M2.latency(8)
    budget = latency.decode_budget(float(q), float(batch), 4, 256.0, 120.0)
    assert budget <= 120
    assert budget == 120 or budget % 2 == 0  # whole clusters of two
    if batch == 256:
        assert budget == min(120, q + q % 2)
    assert budget >= latency.decode_budget(float(q), batch / 2, 4, 256.0, 120.0)


def test_the_hierarchical_path_crosses_nodes_once() -> None:
    network = GLM.latency(24).network
    spread, servers = np.array([6.0]), np.array([15])
    direct = network.exchange(1000.0, 3000.0, spread, servers, hierarchical=False)
    hierarchical = network.exchange(1000.0, 3000.0, spread, servers, hierarchical=True)
    assert hierarchical[0] < direct[0]


def test_a_tensor_parallel_group_divides_what_its_gpus_send() -> None:
    latency = M2.latency(8)
    group = latency.prefill_step(1, 4096, 4096, E4, 1.0, tp=2)
    two = latency.prefill_step(1, 2048, 4096, E4, 1.0)
    assert group.exchange == pytest.approx(two.exchange)
    group, two = (
        latency.decode_step(64, 500, 64, E4, 1.0, 2),
        latency.decode_step(32, 500, 64, E4, 1.0),
    )
    assert group.exchange == pytest.approx(two.exchange)


def test_a_gpu_with_all_experts_exchanges_nothing() -> None:
    latency = M2.latency(1)
    latency.as_one_group(1)
    assert latency.prefill_step(1, 512, 512, np.array([1]), 1.0).exchange == 0


def test_an_all_reduce_between_nodes_shares_their_links() -> None:
    """Slower than within a node, faster than if one NIC carried everything."""
    network, tokens = M2.latency(16).network, 8192.0
    within, between = (network.all_reduce(tokens, gpus) for gpus in (8, 16))
    everything = tokens * M2.model.hidden * 2 / M2.gpu.rdma
    assert within <= between < everything
