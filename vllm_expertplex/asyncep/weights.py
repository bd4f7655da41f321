"""The expert weights of one engine: its shard, its peers' shards, and the buffers between.

Owns: putting a loaded model's experts into the shard, and gathering layers from all shards.
Must not know: vLLM's workers, requests.

The first MoE layer is gathered once and stays: a batch that starts never waits, and the first
gather of a pass has a whole layer's time.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_expertplex.asyncep.board import Board, Counters
from vllm_expertplex.asyncep.config import AsyncEPConfig
from vllm_expertplex.asyncep.experts import describe, order_layers, put_in, take_out
from vllm_expertplex.asyncep.gather import Gather
from vllm_expertplex.asyncep.order import GatherOrder
from vllm_expertplex.asyncep.ring import Prefetcher, Ring
from vllm_expertplex.asyncep.shards import (
    Bytes,
    ShardFile,
    ShardLayout,
    ShardRecord,
    await_file,
)
from vllm_expertplex.layout import ExpertMap, Server


class ExpertWeights:
    """Takes the experts out of `layers`, the model's MoE layers in order, and serves them back."""

    def __init__(
        self,
        run_dir: Path,
        me: Server,
        config: AsyncEPConfig,
        layers: list[Any],
        experts: ExpertMap,
    ) -> None:
        self._run_dir, self._me, self._config = run_dir, me, config
        self._board = Board(run_dir, me)
        local = experts.local_experts(me.rank)
        self.layers = [describe(layer, len(local)) for layer in layers]
        self._layout = ShardLayout(self.layers, experts)
        self._mine = self._store(layers, local)
        self._parts: list[Bytes] = []
        self._rings: list[Ring] = []  # with offloading: near parts of the layers to come
        self._prefetcher: Prefetcher | None = None
        self._far_bytes = 0  # gathered from host memory, because a ring had moved on
        self._kept_layers = 0  # computed from weights that stay
        self.gather: Gather | None = None

    @property
    def names(self) -> list[str]:
        return [layer.name for layer in self.layers]

    @property
    def shard_bytes(self) -> int:
        return self._layout.shard_bytes(self._me.rank)

    @property
    def resident_bytes(self) -> int:
        """What is held near the computation: shard or ring, first layer and buffers."""
        if self._keeps_all:
            return self.shard_bytes
        buffers = min(GatherOrder.BUFFERS, len(self.layers) - 1)
        near = self._config.offload_layers * self._slot_bytes(self._me.rank) or self.shard_bytes
        return near + (1 + buffers) * self._layout.whole_bytes

    @property
    def _keeps_all(self) -> bool:
        """Alone, an engine's shard is all there is: nothing to gather."""
        return self._config.gpus == 1 and not self._config.offload_layers

    def _slot_bytes(self, rank: int) -> int:
        """The largest part of a layer that a rank holds."""
        slices = [self._layout.layer_slice(rank, layer) for layer in range(len(self.layers))]
        return max(part.stop - part.start for part in slices)

    def _store(self, layers: list[Any], local: list[int]) -> ShardFile:
        path = self._run_dir / f"shard-{self._me.name}"
        shard = ShardFile(path, self.shard_bytes)
        for index, (layer, spec) in enumerate(zip(layers, self.layers, strict=True)):
            part = torch.from_numpy(shard.data[self._layout.layer_slice(self._me.rank, index)])
            take_out(layer, spec, spec.views(part, len(local)))
        record = ShardRecord(tuple(self.layers), tuple(local), str(path))
        record.write(self._run_dir, self._me)
        return shard

    def connect(self, layers: list[Any]) -> None:
        """Wait for all peers' shards, gather the first layer and begin with the others.

        Raises TimeoutError naming a peer that is not there, RuntimeError for one that differs.
        """
        for peer in self._config.servers:
            self._parts.append(self._mine.data if peer == self._me else self._open(peer))
        order_layers(self._begin, self._end)
        if self._keeps_all:
            self._keep_all(layers)
            return
        sizes = [self._layout.whole_bytes] * (1 + GatherOrder.BUFFERS)
        whole = [torch.empty(size, dtype=torch.uint8) for size in sizes[: len(layers)]]
        self._whole: list[Bytes] = [buffer.numpy() for buffer in whole]
        order = GatherOrder(max(1, len(layers) - 1))
        for index, (layer, spec) in enumerate(zip(layers, self.layers, strict=True)):
            buffer = whole[0 if index == 0 else 1 + order.buffer(index - 1)]
            put_in(layer, spec.views(buffer, layer.global_num_experts))
        self._pull(0, self._whole[0])
        if self._config.offload_layers and len(layers) > 1:
            self._open_rings(len(layers) - 1)
        if len(layers) > 1:
            self.gather = Gather(
                len(layers) - 1,
                lambda layer, buffer: self._gather(1 + layer, self._whole[1 + buffer]),
                self._config.gather_timeout_s,
            )

    def _keep_all(self, layers: list[Any]) -> None:
        for index, (layer, spec) in enumerate(zip(layers, self.layers, strict=True)):
            part = self._mine.data[self._layout.layer_slice(self._me.rank, index)]
            put_in(layer, spec.views(torch.from_numpy(part), layer.global_num_experts))

    def _open(self, peer: Server) -> Bytes:
        record = ShardRecord.wait(self._run_dir, peer, self._config.startup_timeout_s)
        if record.layers != tuple(self.layers):
            raise RuntimeError(
                f"{peer.name} has MoE layers {[x.name for x in record.layers][:3]}... of "
                f"{record.layers[0].parameters}, {self._me.name} has {self.names[:3]}... of "
                f"{self.layers[0].parameters}: all engines must run the same model"
            )
        return ShardFile(Path(record.path)).data

    def _open_rings(self, layers: int) -> None:
        slots = min(self._config.offload_layers, layers)
        for peer in self._config.servers:
            size = self._slot_bytes(peer.rank)
            path = self._run_dir / f"ring-{peer.name}"
            if peer != self._me:
                await_file(path, peer, self._config.startup_timeout_s)
                self._rings.append(Ring(path, slots, size))
                continue
            partial = path.with_suffix(".partial")
            ring = Ring(partial, slots, size, create=True)
            partial.rename(path)
            self._rings.append(ring)
            self._prefetcher = Prefetcher(ring, layers, lambda i: self._part(self._me.rank, 1 + i))

    def _part(self, rank: int, layer: int) -> Bytes:
        return self._parts[rank][self._layout.layer_slice(rank, layer)]

    def _gather(self, layer: int, whole: Bytes) -> int:
        copied = self._pull(layer, whole)
        if self._prefetcher is not None:
            self._prefetcher.gathered()
        return copied

    def _pull(self, layer: int, whole: Bytes) -> int:
        """Put one layer together in a buffer. Returns bytes."""
        return sum(self._pull_part(rank, layer, whole) for rank in range(len(self._parts)))

    def _pull_part(self, rank: int, layer: int, whole: Bytes) -> int:
        def take(part: Bytes) -> int:
            return self._layout.copy_layer(rank, layer, part, whole)

        far = self._part(rank, layer)
        if self._rings:
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

    def measure_gather(self, rounds: int = 3) -> float:
        """Seconds the slowest layer takes to gather: t_EP. Nothing may be computed meanwhile."""
        scratch = np.empty(self._layout.whole_bytes, np.uint8)
        slowest = 0.0
        for layer in range(1, len(self.layers)):
            best = float("inf")
            for _ in range(rounds):
                started = time.perf_counter()
                self._pull(layer, scratch)
                best = min(best, time.perf_counter() - started)
            slowest = max(slowest, best)
        self._far_bytes = 0
        return slowest
