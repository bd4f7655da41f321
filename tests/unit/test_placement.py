"""Which GPU each server gets, for any layout and number of GPUs."""

import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_expertplex.layout import Layout, Server
from vllm_expertplex.serve import placement
from vllm_expertplex.serve.placement import Place, place

counts = st.integers(1, 6)


percents = st.integers(1, 99)


@given(st.builds(Layout, counts, counts, counts), st.integers(1, 16), percents, percents)
def test_everybody_has_a_gpu_and_sms(layout: Layout, gpus: int, prefill: int, moe: int) -> None:
    places = place(layout, [f"gpu{n}" for n in range(gpus)], prefill, moe)
    assert set(places) == {server.name for server in layout}
    used = Counter(p.gpu for p in places.values())
    for p in places.values():
        assert p.servers == used[p.gpu]
        assert p.mps == (p.servers > 1)
    for servers in (layout.moe_servers, layout.attention_servers):
        shares = Counter(places[server.name].gpu for server in servers)
        assert max(shares.values()) - min(shares.values()) <= 1
    if gpus > layout.moe:
        assert all(
            places[server.name] == Place(places[server.name].gpu) for server in layout.moe_servers
        )
    else:
        assert len(used) == gpus
    for gpu in used:
        here = {s: places[s.name] for s in layout if places[s.name].gpu == gpu}
        by_role = {
            role: [p for s, p in here.items() if s.role == role]
            for role in ("prefill", "decode", "moe")
        }
        experts, attention = by_role["moe"], by_role["prefill"] + by_role["decode"]
        if experts and attention:
            held = sum(p.sm_percent for p in experts)
            assert held <= max(moe, len(experts))
        left = 101 - moe if experts else 100
        for p in by_role["prefill"]:
            assert p.sm_percent == (max(1, prefill * left // 100) if len(attention) > 1 else left)
        assert all(p.sm_percent == left for p in by_role["decode"])


@given(st.sampled_from([78, 114, 132]), st.integers(1, 99))
def test_attention_sees_no_sm_that_experts_hold(sms: int, moe: int) -> None:
    """As MPS shares a GPU's SMs out: rounded down to pairs."""
    places = place(Layout(1, 1, 2), ["0", "1"], 60, moe)
    held, seen = (sms * places[name].sm_percent // 200 * 2 for name in ("moe-0", "decode-0"))
    assert sms - held - 2 <= seen <= sms - held


@given(st.builds(Layout, counts, counts, counts), st.integers(1, 24), st.integers(2, 4))
def test_ranks_have_gpus_of_their_own(layout: Layout, gpus: int, ranks: int) -> None:
    names = [f"gpu{n}" for n in range(gpus)]
    if gpus < ranks:
        with pytest.raises(ValueError, match=f"--tensor-parallel-size {ranks}.*{gpus} are visible"):
            place(layout, names, 60, 60, ranks)
        return
    places = place(layout, names, 60, 60, ranks)
    mine = {server: places[server.name].gpu.split(",") for server in layout}
    used = Counter(gpu for taken in mine.values() for gpu in taken)
    for server, taken in mine.items():
        assert len(set(taken)) == (1 if server.role == "moe" else ranks)
        assert places[server.name].servers == max(used[gpu] for gpu in taken)
    for other in layout.attention_servers:  # all of it is shared, or nothing
        for server in layout.attention_servers:
            assert mine[server] == mine[other] or not {*mine[server]} & {*mine[other]}
    if gpus >= layout.moe + ranks:
        assert all(places[server.name] == Place(*mine[server]) for server in layout.moe_servers)


def test_two_ranks_and_four_gpus_serve_1p1d2e() -> None:
    shared = {"gpu": "0,1", "servers": 2, "mps": True}
    assert place(Layout(1, 1, 2), ["0", "1", "2", "3"], 60, 60, 2) == {
        "prefill-0": Place(**shared, sm_percent=60),
        "decode-0": Place(**shared),
        "moe-0": Place("2"),
        "moe-1": Place("3"),
    }


def test_two_gpus_serve_1p1d1e() -> None:
    shared = {"gpu": "0", "servers": 2, "mps": True}
    assert place(Layout(1, 1, 1), ["0", "1"], 60, 60) == {
        "prefill-0": Place(**shared, sm_percent=60),
        "decode-0": Place(**shared),
        "moe-0": Place("1"),
    }


def test_with_as_many_gpus_as_moe_servers_each_has_both() -> None:
    assert place(Layout(1, 1, 2), ["0", "1"], 60, 70) == {
        "prefill-0": Place("0", 2, True, 31),
        "decode-0": Place("1", 2, True, 31),
        "moe-0": Place("0", 2, True, 70),
        "moe-1": Place("1", 2, True, 70),
    }


def test_one_gpu_holds_everything() -> None:
    assert place(Layout(1, 1, 2), ["7"], 50, 60) == {
        "prefill-0": Place("7", 4, True, 20),
        "decode-0": Place("7", 4, True, 41),
        "moe-0": Place("7", 4, True, 30),
        "moe-1": Place("7", 4, True, 30),
    }


def test_no_gpu_is_an_error() -> None:
    with pytest.raises(ValueError, match="no GPU is visible"):
        place(Layout(1, 1, 1), [], 60, 60)


def test_a_process_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY"):
        monkeypatch.setenv(name, "before")
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "before")
    assert placement.take(tmp_path, Server("prefill", 0)) is None
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "before"
    placement.write_places(tmp_path, place(Layout(1, 1, 1), ["2", "3"], 55, 60))
    placement.take(tmp_path, Server("prefill", 0))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2"
    assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == str(tmp_path / "mps")
    assert os.environ["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "55"
    placement.take(tmp_path, Server("decode", 0))
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in os.environ
    placement.take(tmp_path, Server("moe", 0))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"


def test_visible_gpus_keep_the_names_they_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert placement.visible_gpus(2) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert placement.visible_gpus(2) == ["4", "6"]
