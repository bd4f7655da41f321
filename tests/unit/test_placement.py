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


@given(st.builds(Layout, counts, counts, counts), st.integers(2, 16), st.integers(1, 99))
def test_moe_servers_are_alone_and_attention_servers_even(
    layout: Layout, gpus: int, percent: int
) -> None:
    ids = [f"gpu{n}" for n in range(gpus)]
    if gpus <= layout.moe:
        with pytest.raises(ValueError, match=f"{layout.moe + 1} in all; {gpus} are visible"):
            place(layout, ids, percent)
        return
    places = place(layout, ids, percent)
    assert list(places) == [server.name for server in layout]
    used = Counter(p.gpu for p in places.values())
    for server in layout.moe_servers:
        assert places[server.name] == Place(places[server.name].gpu)
        assert used[places[server.name].gpu] == 1
    attention = [places[server.name] for server in layout.attention_servers]
    shares = Counter(p.gpu for p in attention)
    assert max(shares.values()) - min(shares.values()) <= 1
    assert len(shares) == min(len(attention), gpus - layout.moe)
    for server, p in zip(layout.attention_servers, attention, strict=True):
        assert p.servers == shares[p.gpu]
        assert p.mps == (p.servers > 1)
        limited = p.mps and server.role == "prefill"
        assert p.sm_percent == (percent if limited else 100)


def test_two_gpus_serve_1p1d1e() -> None:
    shared = {"gpu": "0", "servers": 2, "mps": True}
    assert place(Layout(1, 1, 1), ["0", "1"], 60) == {
        "prefill-0": Place(**shared, sm_percent=60),
        "decode-0": Place(**shared),
        "moe-0": Place("1"),
    }


def test_one_gpu_takes_everything_without_mps() -> None:
    places = place(Layout(1, 2, 2), ["7"], 60)
    assert set(places.values()) == {Place("7", 5)}


def test_no_gpu_is_an_error() -> None:
    with pytest.raises(ValueError, match="no GPU is visible"):
        place(Layout(1, 1, 1), [], 60)


def test_a_process_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY"):
        monkeypatch.setenv(name, "before")
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "before")
    assert placement.take(tmp_path, Server("prefill", 0)) is None
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "before"
    placement.write_places(tmp_path, place(Layout(1, 1, 1), ["2", "3"], 55))
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
