"""Two engines on GPUs gather from each other: every layer is whole and right when it is computed.

Rows are whole pages, so each engine's own part stays where it lies. One GPU is enough.
"""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "asyncep"))

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

EXPERTS, LAYERS, PASSES, ENGINES = 5, 7, 6, 2
_ROW = 2 << 20  # bytes of an expert's w13_weight
_DEADLINE_S = 60.0


def _truth(layer: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator("cuda").manual_seed(layer)
    return {
        name: torch.randint(0, 256, shape, generator=generator, device="cuda").byte()
        for name, shape in (
            ("w13_weight", (EXPERTS, 4, _ROW // 4)),
            ("w2_weight", (EXPERTS, 3, 100)),
        )
    }


def _engine(rank: int, folder: Path, meet: Any, results: Any) -> None:
    try:
        results.put((rank, _walk(rank, folder)))
    except BaseException as error:
        results.put((rank, repr(error)))
        raise
    meet.wait(_DEADLINE_S)  # a peer may still open what is here


def _walk(rank: int, folder: Path) -> dict[str, int]:
    import torch
    from moe_layer import MoeLayer

    from vllm_expertplex.asyncep.board import Board
    from vllm_expertplex.asyncep.config import AsyncEPConfig
    from vllm_expertplex.asyncep.cuda_memory import CudaMemory, PinnedMemory
    from vllm_expertplex.asyncep.weights import ExpertWeights
    from vllm_expertplex.layout import ExpertMap

    config = AsyncEPConfig(gpus=ENGINES, startup_timeout_s=_DEADLINE_S)
    split = ExpertMap.contiguous(EXPERTS, ENGINES)
    me = config.servers[rank]
    Board(folder, me, create=True)
    layers = [MoeLayer(i, split.local_experts(rank), _truth(i)) for i in range(LAYERS)]
    weights = ExpertWeights(folder, me, config, layers, split, CudaMemory(), PinnedMemory())
    weights.connect(layers)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    truths = [_truth(i) for i in range(LAYERS)]
    for _ in range(PASSES):  # enqueued without waiting: only events keep layers apart
        for index, layer in enumerate(layers):
            weights._begin(index)
            for name, tensor in truths[index].items():
                wrong += (getattr(layer, name) != tensor).sum()
            weights._end(index)
    torch.cuda.synchronize()
    assert weights.gather is not None
    weights.gather.close()
    counters = weights.gather.counters()
    return {"wrong": int(wrong), "gathered": counters.gathered_bytes}


def test_every_layer_is_whole_in_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from vllm_expertplex.serve.placement import visible_gpus

    gpus = visible_gpus(torch.cuda.device_count())
    context = multiprocessing.get_context("spawn")
    meet, results = context.Barrier(ENGINES), context.Queue()
    processes = []
    for rank in range(ENGINES):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus[rank % len(gpus)])
        processes.append(context.Process(target=_engine, args=(rank, tmp_path, meet, results)))
        processes[-1].start()
    monkeypatch.undo()
    try:
        found = dict(results.get(timeout=2 * _DEADLINE_S) for _ in processes)
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
    gathers = PASSES * (LAYERS - 1) + 2  # two layers of the next pass are there already
    for rank, own in enumerate((3, 2)):
        assert isinstance(found[rank], dict), found[rank]
        copied = EXPERTS * 300 + (EXPERTS - own) * _ROW
        assert found[rank] == {"wrong": 0, "gathered": gathers * copied}
