"""Layouts and the placement of experts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_expertplex.layout import ExpertMap, Layout, Server

counts = st.integers(1, 300)


@given(counts, counts, counts)
def test_a_layout_reads_back_what_it_writes(prefill: int, decode: int, moe: int) -> None:
    layout = Layout(prefill, decode, moe)
    assert Layout.parse(str(layout)) == layout
    assert Layout.parse(f" {str(layout).lower()} ") == layout


def test_servers_come_in_a_fixed_order_with_names() -> None:
    layout = Layout.parse("2P1D2E")
    names = [server.name for server in layout]
    assert names == ["prefill-0", "prefill-1", "decode-0", "moe-0", "moe-1"]
    assert layout.attention_servers == list(layout)[:3]
    assert layout.moe_servers == [Server("moe", 0), Server("moe", 1)]


@pytest.mark.parametrize("text", ["", "1P1D", "1D1P1E", "P1D1E", "1P1D1E1", "-1P1D1E", "1.5P1D1E"])
def test_what_is_no_layout_is_refused_with_the_expected_form(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected xPyDzE.*1P3D4E"):
        Layout.parse(text)


@pytest.mark.parametrize("text", ["0P1D1E", "1P0D1E", "1P1D0E"])
def test_every_role_needs_a_server(text: str) -> None:
    with pytest.raises(ValueError, match=f"layout {text}: every role needs at least one server"):
        Layout.parse(text)


@given(st.integers(1, 400), st.data())
def test_experts_are_spread_evenly_each_in_one_place(experts: int, data: st.DataObject) -> None:
    servers = data.draw(st.integers(1, experts))
    placed = ExpertMap.contiguous(experts, servers)
    held = [placed.local_experts(rank) for rank in range(servers)]
    assert sorted(e for local in held for e in local) == list(range(experts))
    assert max(map(len, held)) - min(map(len, held)) <= 1
    for local in held:
        assert [placed.slot[e] for e in local] == list(range(len(local)))


@pytest.mark.parametrize("servers", [0, 17])
def test_a_server_without_experts_is_refused(servers: int) -> None:
    with pytest.raises(ValueError, match=f"16 experts .* {servers} MoE servers.*between 1 and 16"):
        ExpertMap.contiguous(16, servers)
