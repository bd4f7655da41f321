"""Whole layers to compute from: room for what other engines send, around what is there already.

Owns: that memory. Must not know: when layers are gathered, or by whom.

A room holds one layer at a time. Of a joined piece (`shards.py`) it has the other ranks' parts
only: every layer that uses the room has an address of its own, at which its own part lies between
them. Of other pieces a room holds all, and the own part is copied there like the others'.
"""

from collections.abc import Sequence
from typing import Any

from vllm_expertplex.asyncep.memory import Block, Memory
from vllm_expertplex.asyncep.shards import Piece, ShardLayout


class Room:
    """Memory for one layer on `rank`."""

    def __init__(self, memory: Memory, layout: ShardLayout, rank: int) -> None:
        self._memory = memory
        self.size = 0  # bytes
        self._held: list[list[Any]] = []  # of each piece: what is before the own part, and after
        for pieces in zip(*layout.pieces, strict=True):
            if pieces[0].joined:
                index = pieces[0].index
                parts = [layout.part_bytes(r, index) for r in range(layout.ranks)]
                sizes = [sum(parts[:rank]), sum(parts[rank + 1 :])]
            else:
                sizes = [max(layout.whole_bytes(piece.index) for piece in pieces)]
            self.size += sum(sizes)
            self._held.append([memory.buffer(size) if size else None for size in sizes])

    def place(self, pieces: Sequence[Piece], own: Sequence[Block]) -> list[Any]:
        """Where a layer, whose own parts are `own` by index, is whole: a block for each piece."""
        found = []
        for piece, held in zip(pieces, self._held, strict=True):
            if piece.joined:
                before, after = held
                around = (before, own[piece.index], after)
                found.append(self._memory.join([block for block in around if block is not None]))
            else:
                found.append(held[0])
        return found
