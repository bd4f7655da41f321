"""Eq. (4) through the binding: decode's share of the SMs under contention."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_expertplex._scheduler import sm_budget

CLUSTERS = st.integers(1, 4)
SMS = st.integers(1, 132)
LOADS = st.integers(0, 4096)


@given(q=SMS, q_max=SMS, x_star=st.integers(1, 512), cluster=CLUSTERS, x_moe=LOADS)
def test_share_is_equation_4(q, q_max, x_star, cluster, x_moe):
    share = sm_budget(q=q, q_max=q_max, x_star=x_star, cluster=cluster, x_moe=x_moe)
    exact = q * x_moe / x_star
    assert share % cluster == 0
    assert share >= cluster
    if share > cluster:
        assert share <= q_max
        assert share < exact + cluster
    if share < q_max - q_max % cluster:
        assert share >= exact


@given(q=SMS, q_max=SMS, x_star=st.integers(1, 512), cluster=CLUSTERS, x_moe=LOADS)
def test_more_work_never_means_fewer_sms(q, q_max, x_star, cluster, x_moe):
    budget = {"q": q, "q_max": q_max, "x_star": x_star, "cluster": cluster}
    assert sm_budget(**budget, x_moe=x_moe) <= sm_budget(**budget, x_moe=x_moe + 1)


def test_expected_load_gives_the_offline_budget():
    assert sm_budget(q=44, q_max=120, x_star=8, cluster=2, x_moe=8) == 44


def test_refuses_an_expectation_of_zero():
    with pytest.raises(ValueError, match="x_star"):
        sm_budget(q=44, q_max=120, x_star=0, cluster=2, x_moe=8)
