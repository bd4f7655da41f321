"""Decode's share of the SMs, as configured and as the kernel gets it."""

import pytest

from vllm_expertplex.moe_server.apk.structs import decode_share


@pytest.mark.parametrize(
    ("q", "x_star", "expected"),
    [
        (0, 1, (132, 132, 1, 2)),  # every SM
        (0, 9, (132, 132, 1, 2)),  # however small the operation is
        (44, 9, (44, 132, 9, 2)),
    ],
)
def test_a_share_holds_at_the_expected_load(q: int, x_star: int, expected: tuple) -> None:
    budget = decode_share(132, q, x_star)
    assert (budget.q, budget.q_max, budget.x_star, budget.cluster) == expected


def test_more_sms_than_there_are_are_refused() -> None:
    with pytest.raises(ValueError, match="decode_sms 144: the persistent kernel has 132 SMs"):
        decode_share(132, 144, 9)
