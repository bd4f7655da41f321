"""Where the experts of a layer lie: in one engine's shard, and in a whole layer.

Owns: the layout of both, the record by which peers find shards.
Must not know: vLLM, threads, kinds of memory.

A layer is one or more *pieces*, each some of its parameters. A shard is one block per piece, which
holds, parameter after parameter, the rows of one engine's experts. A whole piece holds each
parameter's rows of all experts in order of index, so an engine's part of a parameter is one run of
bytes in both.

Where memory can be mapped twice, a parameter whose parts are whole pages is a piece of its own:
the whole piece is then the engine's own part, where it lies, between room for the others'.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from vllm_expertplex.asyncep.memory import Block, Pair
from vllm_expertplex.files import write_whole
from vllm_expertplex.layout import ExpertMap, Server

_ALIGN = 256  # bytes, of each parameter; as CUDA aligns allocations


class Parameter(msgspec.Struct, frozen=True):
    """One tensor of a layer with one row of `shape` per expert."""

    name: str
    dtype: str  # as torch spells it, without the module
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of one expert."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.torch_dtype.itemsize


class Layer(msgspec.Struct, frozen=True):
    """The parameters of one MoE layer, the same on every engine."""

    name: str
    parameters: tuple[Parameter, ...]

    def offsets(self, experts: int) -> list[int]:
        """Where each parameter begins when `experts` experts are held, and where the last ends."""
        found, end = [], 0
        for parameter in self.parameters:
            found.append(end)
            end += _aligned(parameter.row_bytes * experts)
        return [*found, end]

    def views(self, buffer: torch.Tensor, experts: int) -> dict[str, torch.Tensor]:
        """Name -> tensor [experts, *shape] in `buffer`, a uint8 tensor of `offsets(...)[-1]`."""
        return {
            p.name: buffer[start : start + p.row_bytes * experts]
            .view(p.torch_dtype)
            .view(experts, *p.shape)
            for p, start in zip(self.parameters, self.offsets(experts)[:-1], strict=True)
        }


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


class ShardRecord(msgspec.Struct, frozen=True):
    """An engine's word that its shard is complete: which experts it has of which layers."""

    layers: tuple[Layer, ...]
    experts: tuple[int, ...]

    @staticmethod
    def file(run_dir: Path, server: Server) -> Path:
        return run_dir / f"shard-{server.name}.json"

    @staticmethod
    def part(run_dir: Path, server: Server, piece: int) -> Path:
        """Where the block of a piece is found."""
        return run_dir / f"shard-{server.name}-{piece}"

    def write(self, run_dir: Path, server: Server) -> None:
        """Whole or not at all, so that a peer never sees half a record."""
        write_whole(self.file(run_dir, server), msgspec.json.encode(self))

    @classmethod
    def wait(cls, run_dir: Path, server: Server, timeout_s: float) -> "ShardRecord":
        """The record of `server`, once there. Raises TimeoutError naming it."""
        file = cls.file(run_dir, server)
        await_file(file, server, timeout_s)
        return msgspec.json.decode(file.read_bytes(), type=cls)


def await_file(file: Path, server: Server, timeout_s: float) -> None:
    """Return once `server` has put `file` there. Raises TimeoutError naming it."""
    deadline = time.monotonic() + timeout_s
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{server.name} has not loaded its experts within startup_timeout_s = "
                f"{timeout_s:g} s"
            )
        time.sleep(0.02)


class Piece(msgspec.Struct, frozen=True):
    """The `index`-th block of every shard. `joined`: its parts are whole pages."""

    index: int
    spec: Layer
    joined: bool


class ShardLayout:
    """Where rank r's parts of each layer lie in its shard and in whole layers."""

    def __init__(
        self, layers: Sequence[Layer], experts: ExpertMap, page: int | None = None
    ) -> None:
        """`page`: bytes, a multiple of 256; None where memory cannot be mapped twice."""
        self.experts = len(experts.server)
        self.ranks = max(experts.server) + 1
        self._counts = [experts.server.count(rank) for rank in range(self.ranks)]
        self._first = [sum(self._counts[:rank]) for rank in range(self.ranks)]
        if len({layer.parameters for layer in layers}) > 1:
            page = None  # what others send shares room between layers of one shape
        self.pieces: list[list[Piece]] = []
        """Of each layer."""
        index = 0
        for layer in layers:
            specs = self._split(layer, page)
            self.pieces.append([Piece(index + i, *found) for i, found in enumerate(specs)])
            index += len(specs)
        self._specs = [piece.spec for pieces in self.pieces for piece in pieces]

    def _split(self, layer: Layer, page: int | None) -> list[tuple[Layer, bool]]:
        def whole_pages(parameter: Parameter) -> bool:
            return page is not None and all(
                n * parameter.row_bytes % page == 0 for n in self._counts
            )

        apart = [p for p in layer.parameters if whole_pages(p)]
        rest = tuple(p for p in layer.parameters if p not in apart)
        found = [(Layer(layer.name, (p,)), True) for p in apart]
        return [*found, (Layer(layer.name, rest), False)] if rest or not found else found

    def part_bytes(self, rank: int, piece: int) -> int:
        """Bytes of rank's part of a piece."""
        return self._specs[piece].offsets(self._counts[rank])[-1]

    def shard_bytes(self, rank: int) -> int:
        """Bytes of rank's parts of all layers."""
        return sum(self.part_bytes(rank, piece) for piece in range(len(self._specs)))

    def whole_bytes(self, piece: int) -> int:
        """Bytes of a piece with all experts."""
        return self._specs[piece].offsets(self.experts)[-1]

    def views(
        self, layer: int, blocks: Sequence[torch.Tensor], experts: int
    ) -> dict[str, torch.Tensor]:
        """Name -> tensor [experts, *shape] of a layer whose pieces are `blocks`, uint8 tensors."""
        found: dict[str, torch.Tensor] = {}
        for piece, block in zip(self.pieces[layer], blocks, strict=True):
            found |= piece.spec.views(block, experts)
        return found

    def copies(self, rank: int, piece: int, part: Block, whole: Block) -> list[Pair]:
        """What to copy to put `part`, rank's part of a piece, into `whole`, all of it."""
        spec, count = self._specs[piece], self._counts[rank]
        found = []
        for parameter, source, target in zip(
            spec.parameters, spec.offsets(count)[:-1], spec.offsets(self.experts)[:-1], strict=True
        ):
            size = parameter.row_bytes * count
            start = target + parameter.row_bytes * self._first[rank]
            found.append((whole[start : start + size], part[source : source + size]))
        return found
