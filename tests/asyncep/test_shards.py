"""Shards put together make the whole layer, whatever the sizes and the split."""

import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_expertplex.asyncep.memory import HostChannel, HostMemory
from vllm_expertplex.asyncep.shards import Layer, Parameter, ShardLayout, ShardRecord
from vllm_expertplex.layout import ExpertMap, Server

_DTYPES = st.sampled_from(["float32", "bfloat16", "float8_e4m3fn", "uint8"])
_SHAPES = st.one_of(
    st.lists(st.integers(1, 5), max_size=3).map(tuple),
    st.sampled_from([(256,), (2, 128), (8, 16, 4)]),  # whole pages, when 256 B are one
)
_LAYERS = st.lists(
    st.lists(st.tuples(_DTYPES, _SHAPES), min_size=1, max_size=4).map(
        lambda found: tuple(Parameter(f"p{i}", *p) for i, p in enumerate(found))
    ),
    min_size=1,
    max_size=4,
).map(lambda layers: [Layer(f"layer{i}", p) for i, p in enumerate(layers)])


@settings(max_examples=60, deadline=None)
@given(layers=_LAYERS, experts=st.integers(1, 9), data=st.data())
def test_parts_make_the_whole_layer(layers: list[Layer], experts: int, data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, experts))
    split = ExpertMap.contiguous(experts, ranks)
    page = data.draw(st.sampled_from([None, 256]))
    layout = ShardLayout(layers, split, page)
    generator = np.random.default_rng(0)
    for index, layer in enumerate(layers):
        truth = {
            p.name: generator.integers(0, 256, (experts, p.row_bytes), np.uint8)
            for p in layer.parameters
        }
        pieces = layout.pieces[index]
        whole = [torch.full((layout.whole_bytes(p.index),), 7, dtype=torch.uint8) for p in pieces]
        for rank in range(ranks):
            mine = split.local_experts(rank)
            parts = [
                torch.zeros(layout.part_bytes(rank, p.index), dtype=torch.uint8) for p in pieces
            ]
            for name, view in layout.views(index, parts, len(mine)).items():
                rows = torch.from_numpy(truth[name][mine])
                view.view(torch.uint8).reshape(len(mine), -1).copy_(rows)
            for piece, part, target in zip(pieces, parts, whole, strict=True):
                copies = layout.copies(rank, piece.index, part.numpy(), target.numpy())
                HostChannel().copy(copies)
                if piece.joined:  # the copy is the whole part, at the sum of the parts before it
                    ((place, source),) = copies
                    assert source.size == part.numel()
                    before = sum(layout.part_bytes(r, piece.index) for r in range(rank))
                    assert place.ctypes.data == target.data_ptr() + before
        found = layout.views(index, whole, experts)
        assert sorted(found) == sorted(truth)
        for name, view in found.items():
            rows = view.contiguous().view(torch.uint8).reshape(experts, -1)
            assert np.array_equal(rows.numpy(), truth[name])


def test_a_peer_cannot_write_a_shard_and_strangers_cannot_read_it(tmp_path: Path) -> None:
    memory = HostMemory()
    mine = memory.create(tmp_path / "shard", 100)
    mine[:] = 5
    peer = memory.open(tmp_path / "shard")
    assert (peer == 5).all()
    with pytest.raises(ValueError, match="read-only"):
        peer[0] = 1
    assert stat.S_IMODE((tmp_path / "shard").stat().st_mode) == 0o600


def test_a_peer_that_never_loads_is_named(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="asyncep-1 has not loaded"):
        ShardRecord.wait(tmp_path, Server("asyncep", 1), 0.05)


def test_a_record_comes_back_as_written(tmp_path: Path) -> None:
    server = Server("asyncep", 0)
    record = ShardRecord((Layer("a", (Parameter("w", "bfloat16", (2, 3)),)),), (0, 1))
    record.write(tmp_path, server)
    assert ShardRecord.wait(tmp_path, server, 1.0) == record
