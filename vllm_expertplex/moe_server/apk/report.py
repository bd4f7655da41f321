"""What the kernel says when something goes wrong.

Owns: reading its report from the memory it shares with the host, and naming what it says.
"""

from __future__ import annotations

import ctypes

import torch

from . import structs

OUT_OF_TIME, TILE_TOO_LONG, OVERDUE, NOT_AN_OPERATION = 1, 2, 3, 4
_REASONS = {
    OUT_OF_TIME: "the launch ran out of time",
    TILE_TOO_LONG: "a tile took too long",
    OVERDUE: "an operation is overdue",
    NOT_AN_OPERATION: "a ready word cannot be served",
}
_STAGES = {**dict(enumerate(structs.STAGES)), structs.HANG: "hanging tile (test)"}
_PHASES = {structs.DECODE: "decode", structs.PREFILL: "prefill"}


class KernelHang(RuntimeError):
    """The kernel ended early; the message names what it was doing."""


class ReportWord:
    """Pinned memory that the kernel writes one report into."""

    def __init__(self) -> None:
        size = ctypes.sizeof(structs.Report)
        self._bytes = torch.zeros(size, dtype=torch.uint8, pin_memory=True)

    @property
    def address(self) -> int:
        return self._bytes.data_ptr()

    def take(self) -> structs.Report | None:
        """The report, once: afterwards there is room for another."""
        found = structs.Report.from_buffer_copy(self._bytes.numpy().tobytes())
        if not found.reason:
            return None
        self._bytes.zero_()
        return found


def describe(r: structs.Report) -> str:
    """One line with everything that the report names."""
    what, phase = _REASONS.get(r.reason, f"reason {r.reason}"), _PHASES.get(r.phase, str(r.phase))
    where = f"phase {phase}, layer {r.layer}, slot {r.slot}"
    if r.reason == OUT_OF_TIME:
        return what
    if r.reason == NOT_AN_OPERATION:
        return (
            f"{what}: {where}, {r.count} tokens; there is no such layer, the slot has no room for "
            "so many tokens, or its operation before has not ended. It was ignored"
        )
    stage = _STAGES.get(r.stage, f"stage {r.stage}")
    if r.reason == OVERDUE:
        return f"{what}: {where}, {stage}, {r.ticket} tiles claimed, {r.count} unfinished"
    return f"{what}: cluster {r.cluster}, {where}, {stage}, tile {r.ticket}"
