"""The expert weights of one engine: its shard, its peers' shards, and the rooms between.

Owns: putting a loaded model's experts into the shard, and gathering layers from all shards.
Must not know: vLLM's workers, requests, how bytes are copied.

The first MoE layer is gathered once and stays: a batch that starts never waits, and the first
gather of a pass has a whole layer's time.
"""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vllm_expertplex.asyncep.board import Board, Counters
from vllm_expertplex.asyncep.config import AsyncEPConfig
from vllm_expertplex.asyncep.experts import describe, order_layers, put_in, take_out
from vllm_expertplex.asyncep.gather import Gather, ThreadGather
from vllm_expertplex.asyncep.memory import Block, Mark, Memory, Pair
from vllm_expertplex.asyncep.order import GatherOrder
from vllm_expertplex.asyncep.places import Room
from vllm_expertplex.asyncep.ring import Prefetcher, Ring
from vllm_expertplex.asyncep.shards import ShardLayout, ShardRecord, await_file
from vllm_expertplex.asyncep.stream_gather import StreamGather
from vllm_expertplex.layout import ExpertMap, Server


class ExpertWeights:
    """Takes the experts out of `layers`, the model's MoE layers in order, and serves them back.

    `near` is the memory that layers are computed from, `far` the host memory of offloaded ones.
    """

    def __init__(
        self,
        run_dir: Path,
        me: Server,
        config: AsyncEPConfig,
        layers: list[Any],
        experts: ExpertMap,
        near: Memory,
        far: Memory,
    ) -> None:
        self._run_dir, self._me, self._config = run_dir, me, config
        self._near, self._home = near, far if config.offload_layers else near
        self._channel = near.channel()
        self._board = Board(run_dir, me)
        local = experts.local_experts(me.rank)
        self.layers = [describe(layer, len(local)) for layer in layers]
        # Parts that are copied from the host cannot stay where they are.
        page = None if config.offload_layers or self._keeps_all else near.page
        self._layout = ShardLayout(self.layers, experts, page)
        self._rooms: list[Room] = []  # the first layer's, and those that take turns
        self._places: list[list[Any]] = []  # of each layer, its pieces
        self._parts: list[list[Any]] = []  # of each rank, its part of each piece
        self._mine = self._store(layers, local)
        self._rings: list[Ring] = []  # with offloading: near parts of the layers to come
        self._prefetcher: Prefetcher | None = None
        self._far_bytes = 0  # gathered from host memory, because a ring had moved on
        self._kept_layers = 0  # computed from weights that stay
        self.gather: Gather | None = None
        self.gather_s = 0.0
        """Seconds the slowest layer takes to gather: t_EP, measured when connecting."""

    @property
    def names(self) -> list[str]:
        return [layer.name for layer in self.layers]

    @property
    def resident_bytes(self) -> int:
        """What is held near the computation: shard or ring, and rooms."""
        shard = self._layout.shard_bytes(self._me.rank)
        near = self._config.offload_layers * self._slot_bytes(self._me.rank) or shard
        return near + sum(room.size for room in self._rooms)

    @property
    def _keeps_all(self) -> bool:
        """Alone, an engine's shard is all there is: nothing to gather."""
        return self._config.gpus == 1 and not self._config.offload_layers

    def _slot_bytes(self, rank: int) -> int:
        """The largest part of a layer that a rank holds. Offloaded layers are one piece."""
        return max(self._layout.part_bytes(rank, layer) for layer in range(len(self.layers)))

    def _store(self, layers: list[Any], local: list[int]) -> list[Any]:
        """Move layer after layer: two copies of all would be too much."""
        shard: list[Any] = []
        for index, (layer, spec) in enumerate(zip(layers, self.layers, strict=True)):
            parts = [
                self._home.create(
                    ShardRecord.part(self._run_dir, self._me, piece.index),
                    self._layout.part_bytes(self._me.rank, piece.index),
                )
                for piece in self._layout.pieces[index]
            ]
            tensors = [self._home.tensor(part) for part in parts]
            take_out(layer, spec, self._layout.views(index, tensors, len(local)))
            shard += parts
        if (computation := self._near.computation()) is not None:
            computation.finish()
        ShardRecord(tuple(self.layers), tuple(local)).write(self._run_dir, self._me)
        return shard

    def connect(self, layers: list[Any]) -> None:
        """Wait for all peers' shards, gather the first layer and begin with the others.

        Raises TimeoutError naming a peer that is not there, RuntimeError for one that differs.
        """
        for peer in self._config.servers:
            self._parts.append(self._mine if peer == self._me else self._open(peer))
        order_layers(self._begin, self._end)
        if self._keeps_all:
            for index, layer in enumerate(layers):
                parts = [self._mine[piece.index] for piece in self._layout.pieces[index]]
                self._compute_from(layer, index, parts)
            return
        rooms = min(1 + GatherOrder.BUFFERS, len(layers))
        self._rooms = [Room(self._near, self._layout, self._me.rank) for _ in range(rooms)]
        order = GatherOrder(max(1, len(layers) - 1))
        for index, layer in enumerate(layers):
            room = self._rooms[0 if index == 0 else 1 + order.buffer(index - 1)]
            self._places.append(room.place(self._layout.pieces[index], self._mine))
            self._compute_from(layer, index, self._places[index])
        self._pull(0)
        self._channel.finish()
        if len(layers) > 1:
            self.gather_s = self._measure()
            if self._config.offload_layers:
                self._open_rings(len(layers) - 1)
            self.gather = self._begin_gathering(len(layers) - 1)

    def _compute_from(self, layer: Any, index: int, blocks: list[Any]) -> None:
        tensors = [self._near.tensor(block) for block in blocks]
        put_in(layer, self._layout.views(index, tensors, layer.global_num_experts))

    def _open(self, peer: Server) -> list[Any]:
        record = ShardRecord.wait(self._run_dir, peer, self._config.startup_timeout_s)
        if record.layers != tuple(self.layers):
            raise RuntimeError(
                f"{peer.name} has MoE layers {[x.name for x in record.layers][:3]}... of "
                f"{record.layers[0].parameters}, {self._me.name} has {self.names[:3]}... of "
                f"{self.layers[0].parameters}: all engines must run the same model"
            )
        paths = [ShardRecord.part(self._run_dir, peer, i) for i in range(len(self._mine))]
        return [self._home.open(path) for path in paths]

    def _open_rings(self, layers: int) -> None:
        slots = min(self._config.offload_layers, layers)
        for peer in self._config.servers:
            mine = peer == self._me
            path = self._run_dir / f"ring-{peer.name}"
            if not mine:
                await_file(path, peer, self._config.startup_timeout_s)
            ring = Ring(path, slots, self._slot_bytes(peer.rank), self._near, create=mine)
            self._rings.append(ring)
        self._prefetcher = Prefetcher(
            self._rings[self._me.rank],
            layers,
            lambda layer: self._mine[1 + layer],
            self._near.channel(),
        )

    def _begin_gathering(self, layers: int) -> Gather:
        computation = self._near.computation()
        if computation is None or self._rings:  # whoever reads a ring must look at it twice
            timeout_s = self._config.gather_timeout_s
            return ThreadGather(layers, self._gather, timeout_s, computation)

        return StreamGather(
            layers, lambda layer, _: self._pull(1 + layer), self._channel, computation
        )

    def _gather(self, layer: int, buffer: int, used: Mark | None) -> int:
        self._channel.after(used)
        copied = self._pull(1 + layer)
        self._channel.finish()
        if self._prefetcher is not None:
            self._prefetcher.gathered()
        return copied

    def _pull(self, layer: int) -> int:
        """Begin to put one layer together in its place. Returns bytes."""
        if self._rings:
            return sum(self._pull_near(rank, layer) for rank in range(len(self._parts)))
        return self._channel.copy(self._pairs(range(len(self._parts)), layer))

    def _pairs(self, ranks: Iterable[int], layer: int) -> list[Pair]:
        """What to copy to put these ranks' parts of a layer in its place."""
        return [
            pair
            for piece, whole in zip(self._layout.pieces[layer], self._places[layer], strict=True)
            for rank in ranks
            if not (piece.joined and rank == self._me.rank)
            for pair in self._layout.copies(
                rank, piece.index, self._parts[rank][piece.index], whole
            )
        ]

    def _pull_near(self, rank: int, layer: int) -> int:
        """Put one rank's part of a layer in its place, from the rank's ring if that has it."""
        (whole,) = self._places[layer]

        def take(part: Block) -> int:
            copied = self._channel.copy(self._layout.copies(rank, layer, part, whole))
            self._channel.finish()
            return copied

        far = self._parts[rank][layer]
        if rank == self._me.rank:
            assert self._prefetcher is not None  # as there are rings
            self._prefetcher.wait(self._config.gather_timeout_s)
        near = self._rings[rank].read(layer - 1, far.size, take)
        if near is not None:
            return near
        self._far_bytes += far.size
        return take(far)

    def _begin(self, layer: int) -> None:
        if layer > 0 and self.gather is not None:
            self.gather.begin(layer - 1)

    def _end(self, layer: int) -> None:
        counters = Counters()
        if self.gather is not None:
            if layer > 0:
                self.gather.end(layer - 1)
            counters = self.gather.counters()
        self._kept_layers += layer == 0 or self.gather is None
        layers = counters.layers + self._kept_layers
        self._board.publish(counters._replace(layers=layers, far_bytes=self._far_bytes))

    def _measure(self, rounds: int = 3) -> float:
        """Offloaded, every engine brings its own part from the host, and that takes longest."""
        ranks = [self._me.rank] if self._config.offload_layers else range(len(self._parts))
        slowest = 0.0
        for layer in range(1, len(self.layers)):
            pairs = self._pairs(ranks, layer)
            best = float("inf")
            for _ in range(rounds):
                started = time.perf_counter()
                self._channel.copy(pairs)
                self._channel.finish()
                best = min(best, time.perf_counter() - started)
            slowest = max(slowest, best)
        return slowest
