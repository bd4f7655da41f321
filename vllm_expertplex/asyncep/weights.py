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
from vllm.logger import init_logger

from vllm_expertplex.asyncep.board import Board, Counters
from vllm_expertplex.asyncep.config import AsyncEPConfig
from vllm_expertplex.asyncep.experts import describe, order_layers, put_in, take_out
from vllm_expertplex.asyncep.gather import Gather
from vllm_expertplex.asyncep.order import GatherOrder
from vllm_expertplex.asyncep.shards import Bytes, ShardFile, ShardLayout, ShardRecord
from vllm_expertplex.layout import ExpertMap, Server

logger = init_logger(__name__)


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
        """Shard, first layer and buffers."""
        if self._config.gpus == 1:
            return self.shard_bytes
        buffers = min(GatherOrder.BUFFERS, len(self.layers) - 1)
        return self.shard_bytes + (1 + buffers) * self._layout.whole_bytes

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
        if self._config.gpus == 1:
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
        if len(layers) > 1:
            self.gather = Gather(
                len(layers) - 1,
                lambda layer, buffer: self._pull(1 + layer, self._whole[1 + buffer]),
                self._config.gather_timeout_s,
            )

    def _keep_all(self, layers: list[Any]) -> None:
        """Alone, an engine's shard is all there is: nothing to gather."""
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

    def _pull(self, layer: int, whole: Bytes) -> int:
        """Gather one layer into a buffer."""
        return sum(
            self._layout.copy_layer(rank, layer, part[self._layout.layer_slice(rank, layer)], whole)
            for rank, part in enumerate(self._parts)
        )

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
        self._board.publish(counters._replace(layers=counters.layers + self._kept_layers))

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
        return slowest
