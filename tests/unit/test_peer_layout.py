"""Slots, ready words and records of the GPU data path, without a GPU."""

import itertools
import threading
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_expertplex.comm import peer
from vllm_expertplex.comm.peer import DoneRecord, Ready, SlotLayout, SlotsRecord
from vllm_expertplex.layout import Server, SlotOwner

layouts = st.builds(
    SlotLayout,
    st.integers(1, 20_000),
    st.integers(1, 64).map(lambda n: n * 128),
    st.integers(1, 16),
    st.booleans(),
)


@given(layouts)
def test_sections_are_aligned_in_order_and_large_enough(s: SlotLayout) -> None:
    token_bytes = s.hidden if s.fp8 else 2 * s.hidden
    scale_bytes = s.hidden // 128 * 4 if s.fp8 else 0
    sizes = [
        (0, peer.HEADER_BYTES),
        (s.tokens_at, s.max_tokens * token_bytes),
        (s.scales_at, s.max_tokens * scale_bytes),
        (s.ids_at, s.max_tokens * s.topk * 4),
        (s.weights_at, s.max_tokens * s.topk * 4),
        (s.result_at, s.max_tokens * s.hidden * 2),
        (s.size, 0),
    ]
    for (start, size), (following, _) in itertools.pairwise(sizes):
        assert following % 1024 == 0
        assert 0 <= following - (start + size) < 1024


def test_offsets_of_minimax_m2_are_those_of_the_kernels() -> None:
    s = SlotLayout(64, 3072, 8, True)
    assert (s.tokens_at, s.scales_at, s.ids_at) == (1024, 197_632, 203_776)
    assert (s.weights_at, s.result_at, s.size) == (205_824, 207_872, 601_088)


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_tokens", 0), ("max_tokens", 1 << 20), ("hidden", 100), ("hidden", 0), ("topk", 33)],
)
def test_what_the_kernels_cannot_hold_is_refused_by_value(field: str, value: int) -> None:
    good = {"max_tokens": 64, "hidden": 256, "topk": 4, "fp8": True}
    with pytest.raises(ValueError, match=str(value)):
        SlotLayout(**{**good, field: value})


@given(
    st.integers(1, 2**32 - 1), st.integers(0, 1), st.integers(0, 2047), st.integers(0, 2**20 - 1)
)
def test_a_ready_word_holds_its_four_values(seq: int, phase: int, layer: int, tokens: int) -> None:
    word = Ready(seq, phase, layer, tokens).pack()
    assert 0 < word < 2**64
    assert Ready.unpack(word) == (seq, phase, layer, tokens)
    assert word >> 32 == seq


def slots_record() -> SlotsRecord:
    owner, layout = SlotOwner(Server("prefill", 0)), SlotLayout(64, 256, 4, False)
    return SlotsRecord(Server("moe", 1), "GPU-1", [owner], [layout], [bytes(range(64))])


def test_records_come_back_as_they_were_published(tmp_path: Path) -> None:
    slots = slots_record()
    halves = [SlotOwner(Server("prefill", 0)), SlotOwner(Server("prefill", 0), 1)]
    done = [DoneRecord(owner, "GPU-0", 2, bytes([i] * 64)) for i, owner in enumerate(halves)]
    for record in (slots, *done):
        peer.publish(tmp_path, record)
    assert peer.await_record(tmp_path, SlotsRecord, slots.server, 0) == slots
    assert [peer.await_record(tmp_path, DoneRecord, owner, 0) for owner in halves] == done


def test_a_reader_waits_for_a_record(tmp_path: Path) -> None:
    slots = slots_record()
    writer = threading.Timer(0.1, peer.publish, (tmp_path, slots))
    writer.start()
    assert peer.await_record(tmp_path, SlotsRecord, slots.server, 10) == slots
    writer.join()


def test_a_record_that_never_comes_is_named(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"moe-1 .*peer-slots-moe-1\.json within 0\.05 s"):
        peer.await_record(tmp_path, SlotsRecord, Server("moe", 1), 0.05)
    assert time.monotonic() - begin < 5


def test_a_damaged_record_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "peer-slots-moe-1.json").write_bytes(b'{"server": {"role": "moe"')
    with pytest.raises(msgspec.DecodeError):
        peer.await_record(tmp_path, SlotsRecord, Server("moe", 1), 5)
