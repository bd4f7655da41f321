"""What the kernel reports is told by name, and an operation's handle holds what it is given."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_expertplex.moe_server.apk import report, structs


@pytest.mark.parametrize(
    ("reason", "fields", "said"),
    [
        (report.OUT_OF_TIME, {}, "the launch ran out of time"),
        (
            report.TILE_TOO_LONG,
            {"cluster": 7, "phase": 1, "stage": structs.DOWN, "layer": 3, "ticket": 9, "slot": 2},
            "a tile took too long: cluster 7, phase prefill, layer 3, slot 2, Down, tile 9",
        ),
        (
            report.OVERDUE,
            {"stage": structs.GATHER, "layer": 61, "ticket": 5, "count": 2},
            "an operation is overdue: phase decode, layer 61, slot 0, gather, 5 tiles claimed, "
            "2 unfinished",
        ),
        (
            report.NOT_AN_OPERATION,
            {"phase": 1, "layer": 900, "slot": 4, "count": 70_000},
            "a ready word cannot be served: phase prefill, layer 900, slot 4, 70000 tokens",
        ),
    ],
)
def test_a_report_names_what_it_is_about(reason: int, fields: dict[str, int], said: str) -> None:
    assert report.describe(structs.Report(taken=1, reason=reason, **fields)).startswith(said)


@given(
    st.integers(0, structs.MAX_TEMPLATES - 1),
    st.booleans(),
    st.integers(0, (1 << 20) - 1),
    st.integers(0, (1 << 32) - 1),
)
def test_a_handle_keeps_its_parts_apart(
    template: int, wide: bool, tokens: int, identity: int
) -> None:
    """As `csrc/apk/operation.cuh` takes it apart; bit 10 says that slots are merged."""
    packed = structs.handle(template, wide, tokens, identity)
    assert packed < 1 << 64
    assert (packed & 0x3FF, packed >> 10 & 1, packed >> 11 & 1) == (template, 0, wide)
    assert (packed >> 12 & 0xFFFFF, packed >> 32) == (tokens, identity)


@pytest.mark.parametrize(("template", "tokens"), [(1 << 10, 1), (0, 1 << 20)])
def test_what_a_handle_has_no_room_for_is_refused(template: int, tokens: int) -> None:
    with pytest.raises(ValueError, match=f"template {template}, {tokens} tokens"):
        structs.handle(template, False, tokens, 0)
