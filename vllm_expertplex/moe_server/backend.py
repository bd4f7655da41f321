"""What a MoE server needs from whatever computes its experts.

Owns: the operation and weight types that cross between the server loop and a backend.
Must not know: shared memory, vLLM, HTTP.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

# What a backend counts, as `expertplex:` metrics: (name, unit divisor, help).
COUNTERS = (
    ("tiles_decode", 1, "Tiles of decode operations."),
    ("tiles_prefill", 1, "Tiles of prefill operations."),
    ("preemptions", 1, "Times a worker left prefill for decode at a tile boundary."),
    (
        "preemption_seconds",
        1e9,
        "Time from urgent words to the last prefill tiles.",
    ),
    ("preemption_longest_seconds", 1e9, "The longest time from an urgent word to that tile."),
    ("worker_idle_seconds", 1e9, "Time workers had nothing to do."),
    ("worker_busy_seconds_decode", 1e9, "Time workers spent in decode tiles."),
    ("worker_busy_seconds_prefill", 1e9, "Time workers spent in prefill tiles."),
    ("weight_bytes_read", 1, "Bytes of expert weights read."),
    ("coalesced_operations", 1, "Decode operations that ran as part of another."),
    ("decode_share", 1, "Workers reserved for decode, q of the SM budget."),
    ("decode_share_last", 1, "Workers the latest decode operation was given, q'."),
)


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The routed experts of one layer that live on this server, in checkpoint order of slots.

    w13: [experts, 2 * intermediate, hidden], gate rows first; w2: [experts, hidden, intermediate].
    bf16, fp16 or fp32; or FP8 e4m3 with fp32 scales of 128 x 128 blocks:
    w13_scale [experts, 2 * ceil(intermediate / 128), ceil(hidden / 128)], w2_scale likewise.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    w13_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None

    @property
    def bytes(self) -> int:
        tensors = (self.w13, self.w2, self.w13_scale, self.w2_scale)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)


@dataclass(slots=True)
class Operation:
    """One MoE operation: a layer's tokens from one attention server.

    x [n, hidden], topk_ids [n, topk] int32 (slot of a local expert, or -1 where the expert lives
    elsewhere); out [n, topk, hidden] fp32 receives `expert_k(x)` of each token, not weighted. Rows
    of experts elsewhere are left as they are: nobody reads them. All are views of the attention
    server's slot. `complete` publishes the done word; call it exactly once, from any thread, after
    `out` is whole.
    """

    source: int
    phase: int
    layer: int
    x: torch.Tensor
    topk_ids: torch.Tensor
    out: torch.Tensor
    complete: Callable[[], None]


class Backend(Protocol):
    """Computes operations. An error in one is an error of the server: raise it from `submit`."""

    def submit(self, operations: Sequence[Operation]) -> None:
        """Start, or run, operations that became ready together; each layer's may be merged."""

    def poll(self) -> list[int]:
        """Raise what went wrong since the last call; else the values of `COUNTERS`, in order."""

    def close(self) -> None:
        """Stop within seconds; operations that did not finish stay unfinished."""
