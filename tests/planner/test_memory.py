"""Memory: bounds are exact and grow as they must."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_expertplex.planner.assumptions import Assumptions
from vllm_expertplex.planner.hardware import GPUS
from vllm_expertplex.planner.memory import Memory
from vllm_expertplex.planner.model_configs import load_model


def memory(model: str = "minimax-m2.7", gpu: str = "h800", **changes: object) -> Memory:
    return Memory(load_model(model), GPUS[gpu], Assumptions(**changes))  # type: ignore[arg-type]


def test_four_moe_servers_are_the_fewest_for_m2_7_on_80_gb() -> None:
    m = memory()
    assert m.moe_fits(1.0, 3.0, 4.0)
    assert not m.moe_fits(1.0, 3.0, 3.0)


@given(
    servers=st.integers(4, 60),
    total=st.integers(2, 60),
    tp=st.sampled_from([1, 2, 4]),
    tokens=st.sampled_from([100, 256, 512, 1024, 8192, 40_000]),
)
def test_the_bounds_on_prefill_servers_are_exact(servers, total, tp, tokens) -> None:
    m = memory(prefill_tokens=tokens)
    low, high = m.prefill_bounds(np.array([servers]), np.array([total]), tp, 1)
    for prefill in range(total + 1):
        fits = bool(m.moe_fits(prefill / tp, float(total - prefill), float(servers)))
        assert fits == (low[0] <= prefill <= high[0])


def test_uneven_experts_count_the_fullest_server() -> None:
    m = memory("glm-5.1-fp8")
    one = m.model.expert_weight_bytes * m.model.moe_layers
    assert m.experts(15.0) == 18 * one  # 256 experts on 15 servers
    assert m.experts(16.0) == 16 * one


def test_average_buffers_are_smaller_than_worst_ones() -> None:
    worst, average = memory(), memory(buffers="average")
    assert average.buffers(3.0, 5.0, 8.0) < worst.buffers(3.0, 5.0, 8.0)


def test_tensor_parallelism_widens_kv() -> None:
    m = memory()
    assert m.kv_tokens(2) > 2 * m.kv_tokens(1)
