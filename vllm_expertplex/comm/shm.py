"""The shared-memory transport: files of a run, and the two ends of the data path over them.

Owns: where boards and slots live, their shapes, turning tensors into addresses and back.
Must not know: models, scheduling, phases' policies.

The layout of the files and the memory ordering are in `csrc/comm/`.
"""

import ctypes
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from vllm_expertplex._comm import AttentionEndpoint, Board, MoeEndpoint, Shape, Slot
from vllm_expertplex.layout import ExpertMap, Layout, Server, SlotOwner

__all__ = ["AttentionPeer", "Board", "Shape", "Slot", "SlotTensors", "board_path", "slot_path"]


def board_path(run_dir: Path, moe: Server) -> str:
    """The file of a MoE server's board: doorbell, heartbeat, stop word, counters."""
    return str(run_dir / f"board-{moe.name}")


def slot_path(run_dir: Path, owner: SlotOwner, moe: Server) -> str:
    """The file of a slot on a MoE server."""
    return str(run_dir / f"slot-{owner.name}-{moe.name}")


class MoeServerLost(RuntimeError):
    """A MoE server is gone, or did not finish an operation before the deadline."""


class AttentionPeer:
    """An attention server's end: dispatch a layer's tokens, combine what comes back.

    One operation at a time, in the slots of `owner`. `layer_names` only serve messages.
    """

    def __init__(
        self,
        run_dir: Path,
        owner: SlotOwner,
        layout: Layout,
        shape: Shape,
        experts: ExpertMap,
        spin_us: int,
        timeout_s: float,
    ) -> None:
        self._name = owner.name
        self._shape = shape
        self._timeout_s = timeout_s
        self._endpoint = AttentionEndpoint(
            [slot_path(run_dir, owner, moe) for moe in layout.moe_servers],
            [board_path(run_dir, moe) for moe in layout.moe_servers],
            shape,
            experts.server,
            experts.slot,
            spin_us * 1000,
        )
        self._sum = torch.empty(shape.max_tokens, shape.hidden, dtype=torch.float32)
        self.layer_names: list[str] = []

    def dispatch(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        layer: int,
        phase: int,
    ) -> None:
        """Push x [n, hidden] with topk_weights [n, topk] fp32 and topk_ids [n, topk] int32.

        Raises ValueError with both shapes where they do not fit the slots.
        """
        n, slots = x.shape[0], self._shape
        found = (x.shape, x.itemsize, topk_ids.shape, topk_weights.shape)
        expected = ((n, slots.hidden), slots.item, (n, slots.topk), (n, slots.topk))
        if found != expected:
            raise ValueError(
                f"{self._name}: x, its bytes per element, topk_ids, topk_weights are {found}, "
                f"the slots expect {expected}; the layer is not the one the configuration describes"
            )
        # vLLM's routers return these types and layouts already, and then this costs nothing.
        x = x.contiguous()
        ids = topk_ids.to(torch.int32).contiguous()
        weights = topk_weights.to(torch.float32).contiguous()
        self._layer = layer
        self._endpoint.dispatch(x.data_ptr(), ids.data_ptr(), weights.data_ptr(), n, layer, phase)

    def combine(self, tokens: int, dtype: torch.dtype) -> torch.Tensor:
        """Wait for every MoE server and return the sums [tokens, hidden] as `dtype`, rounded once:
        fp32 sums over k of weight_k * row_k in the order of k, whichever servers the rows are on.

        Raises MoeServerLost with the server and the layer it was waited for.
        """
        lost = self._endpoint.combine(self._sum.data_ptr(), int(self._timeout_s * 1e9))
        if lost >= 0:
            name = self.layer_names[self._layer] if self.layer_names else str(self._layer)
            raise MoeServerLost(
                f"{self._name}: moe-{lost} did not finish layer {name} for {tokens} tokens: "
                f"it is gone, or slower than moe_timeout_s = {self._timeout_s:g} s"
            )
        # `to` copies only when the type differs; a model in fp32 needs its own copy.
        return self._sum[:tokens].to(dtype, copy=True)


class SlotTensors(NamedTuple):
    """A slot's buffers as tensors, on the MoE server; see `csrc/comm/region.h`."""

    x: torch.Tensor
    topk_ids: torch.Tensor
    out: torch.Tensor

    @classmethod
    def of(
        cls, endpoint: MoeEndpoint, source: int, shape: Shape, dtype: torch.dtype
    ) -> "SlotTensors":
        """Views of slot `source`, [max_tokens, ...]; valid while `endpoint` lives."""
        kinds: Sequence[tuple[torch.dtype, tuple[int, ...]]] = (
            (dtype, (shape.hidden,)),
            (torch.int32, (shape.topk,)),
            (torch.float32, (shape.topk, shape.hidden)),
        )
        tensors = []
        for address, (kind, token) in zip(endpoint.buffers(source), kinds, strict=True):
            size = shape.max_tokens * math.prod(token) * kind.itemsize
            buffer = (ctypes.c_char * size).from_address(address)
            tensors.append(torch.frombuffer(buffer, dtype=kind).view(shape.max_tokens, *token))
        return cls(*tensors)
