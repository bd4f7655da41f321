"""Engines in one process, each walking through its layers at its own pace: every layer is whole and
right when its turn comes, from shards and from rings.
"""

import ctypes
import mmap
import os
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from moe_layer import MoeLayer

from vllm_expertplex.asyncep.board import Board
from vllm_expertplex.asyncep.config import AsyncEPConfig
from vllm_expertplex.asyncep.memory import Bytes, HostMemory
from vllm_expertplex.asyncep.weights import ExpertWeights
from vllm_expertplex.layout import ExpertMap

EXPERTS = 5
_MEMORIES = (HostMemory(), HostMemory())
_PAGE = 4096  # bytes; what an expert's rows of w13_weight have


def _truth(index: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    return {
        "w13_weight": torch.randn(EXPERTS, 32, 32, generator=generator),
        "w2_weight": torch.randn(EXPERTS, 4, 3, generator=generator).bfloat16(),
    }


class _JoinableMemory(HostMemory):
    """Joins files of memory by mapping them a second time."""

    page = _PAGE

    def __init__(self) -> None:
        self._files: dict[int, int] = {}  # address -> descriptor

    def create(self, path: Path, size: int) -> Bytes:
        block = super().create(path, size)
        self._files[block.ctypes.data] = os.open(path, os.O_RDWR)
        return block

    def buffer(self, size: int) -> Bytes:
        file = os.memfd_create("buffer")
        os.ftruncate(file, max(size, 1))
        block: Bytes = np.frombuffer(mmap.mmap(file, 0), np.uint8)[:size]
        self._files[block.ctypes.data] = file
        return block

    def join(self, blocks: Sequence[Bytes]) -> Bytes:
        sizes = [block.size for block in blocks]
        assert not any(size % _PAGE for size in sizes)
        joined: Bytes = np.frombuffer(mmap.mmap(-1, sum(sizes)), np.uint8)
        remap = ctypes.CDLL(None, use_errno=True).mmap
        remap.restype, remap.argtypes = ctypes.c_size_t, [ctypes.c_size_t] * 6
        address = joined.ctypes.data
        for block in blocks:
            access, fixed = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | 0x10
            file = self._files[block.ctypes.data]
            assert remap(address, block.size, access, fixed, file, 0) == address
            address += block.size
        return joined


def _walk(weights: ExpertWeights, layers: list[Any], passes: int, pace: random.Random) -> None:
    for _ in range(passes):
        for index, layer in enumerate(layers):
            weights._begin(index)
            for _ in range(2):  # and stays right for as long as the turn lasts
                for name, tensor in _truth(index).items():
                    assert torch.equal(getattr(layer, name), tensor), (index, name)
                time.sleep(pace.random() * 1e-3)
            weights._end(index)


@pytest.mark.parametrize("joinable", [False, True], ids=["copied", "joined"])
@pytest.mark.parametrize(
    ("engines", "layers", "offload"),
    [(1, 4, 0), (2, 1, 0), (2, 2, 0), (2, 3, 0), (3, 6, 0), (2, 6, 2), (3, 5, 9), (1, 6, 1)],
)
def test_every_layer_is_whole_in_its_turn(
    tmp_path: Path, engines: int, layers: int, offload: int, joinable: bool
) -> None:
    config = AsyncEPConfig(gpus=engines, offload_layers=offload, startup_timeout_s=10.0)
    split = ExpertMap.contiguous(EXPERTS, engines)
    failures: list[BaseException] = []
    boards = [Board(tmp_path, server, create=True) for server in config.servers]
    passes = 12

    def engine(rank: int) -> None:
        try:
            made = [MoeLayer(i, split.local_experts(rank), _truth(i)) for i in range(layers)]
            memories = (_JoinableMemory() if joinable else HostMemory(), HostMemory())
            weights = ExpertWeights(tmp_path, config.servers[rank], config, made, split, *memories)
            weights.connect(made)
            _walk(weights, made, passes, random.Random(rank))
            if weights.gather is not None:
                weights.gather.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=engine, args=(rank,)) for rank in range(engines)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    for rank, board in enumerate(boards):
        counters = board.read()
        assert counters.layers == passes * layers
        copied = sum(t.nbytes for t in _truth(0).values())
        if joinable and not offload:  # its own part of this one is there
            copied -= split.server.count(rank) * _PAGE
        assert counters.gathered_bytes == counters.gathers * copied
        if engines == 1:  # nothing is brought from the host twice
            assert counters.far_bytes == 0


def test_an_engine_with_other_layers_is_refused(tmp_path: Path) -> None:
    config = AsyncEPConfig(gpus=2, startup_timeout_s=5.0)
    split = ExpertMap.contiguous(EXPERTS, 2)
    for server in config.servers:
        Board(tmp_path, server, create=True)
    made = [
        [MoeLayer(i, split.local_experts(rank), _truth(i)) for i in range(2 + rank)]
        for rank in range(2)
    ]
    weights = [
        ExpertWeights(tmp_path, server, config, layers, split, *_MEMORIES)
        for server, layers in zip(config.servers, made, strict=True)
    ]
    with pytest.raises(RuntimeError, match="all engines must run the same model"):
        weights[0].connect(made[0])


def test_a_full_shared_memory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    config = AsyncEPConfig(gpus=1)
    Board(tmp_path, config.servers[0], create=True)
    split = ExpertMap.contiguous(EXPERTS, 1)
    with pytest.raises(OSError, match=r"shard of \d+ MiB: No space left"):
        ExpertWeights(
            tmp_path,
            config.servers[0],
            config,
            [MoeLayer(0, [0, 1, 2, 3, 4], _truth(0))],
            split,
            *_MEMORIES,
        )
