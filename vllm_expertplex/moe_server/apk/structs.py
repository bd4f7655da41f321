"""ctypes mirrors of `csrc/apk/layout.cuh` and `csrc/scheduler/`; sizes are checked at load."""

from __future__ import annotations

import ctypes as c

U32, U64, Pointer = c.c_uint32, c.c_uint64, c.c_uint64
TENSOR_MAP = c.c_uint8 * 128

DECODE, PREFILL = 0, 1
COUNT, COPY, GATE_UP, ACTIVATE, DOWN, GATHER = range(6)
STAGES = ("scatter: count", "scatter: copy", "GateUp", "SiLU*mul + quantise", "Down", "gather")
HANG = 7  # a tile that never ends, for testing the watchdog
MAX_STAGES = 8


MAX_TEMPLATES, MAX_TOKENS = 1 << 10, (1 << 20) - 1


def handle(template: int, wide: bool, tokens: int, identity: int) -> int:
    """`Operation.user`; see `csrc/apk/operation.cuh`."""
    if template >= MAX_TEMPLATES or tokens > MAX_TOKENS:
        raise ValueError(
            f"template {template}, {tokens} tokens: an operation's handle has room for "
            f"{MAX_TEMPLATES} templates and {MAX_TOKENS} tokens"
        )
    low = tokens << 12 | int(wide) << 11 | template
    return identity << 32 | low


class _Struct(c.Structure):
    pass


class Budget(_Struct):
    _fields_ = (("q", U32), ("q_max", U32), ("x_star", U32), ("cluster", U32))


def decode_share(sms: int, q: int, x_star: int) -> Budget:
    """Eq. (4): under contention decode has `q` of `sms` SMs at `x_star` pairs of an expert and a
    block of its rows; with q = 0 it may have them all. Raises ValueError for more than there are.
    """
    if q > sms:
        raise ValueError(f"decode_sms {q}: the persistent kernel has {sms} SMs on this GPU")
    return Budget(q or sms, sms, x_star if q else 1, 2)


class Config(_Struct):
    _fields_ = (("workers", U32), ("quantum", U32), ("hold_ns", U64), ("budget", Budget))


class Operation(_Struct):
    _fields_ = (
        ("sources", U64),
        ("user", U64),
        ("layer", U32),
        ("x_moe", U32),
        ("n_stages", U32),
        ("tiles", U32 * MAX_STAGES),
    )


class Arrival(_Struct):
    _fields_ = (("op", Operation), ("at_ns", U64), ("phase", U32), ("after", U32))


class Times(_Struct):
    _fields_ = (("submitted", U64), ("first_tile", U64), ("done", U64))


class TileTime(_Struct):
    _fields_ = (
        ("began", U64),
        ("ended", U64),
        ("phase", U32),
        ("stage", U32),
        ("identity", U32),
        ("ticket", U32),
    )


class ServedSlot(_Struct):
    _fields_ = (
        ("ready", Pointer),
        ("done", Pointer),
        ("source", U32),
        ("max_tokens", U32),
        ("seen", U32),
        ("reserved", U32),
    )


MAX_SLOTS = 32  # one per lane of the controller


class Members(_Struct):
    _fields_ = (
        ("count", U32),
        ("first", U32 * MAX_SLOTS),
        ("slot", U32 * MAX_SLOTS),
        ("seq", U32 * MAX_SLOTS),
    )


class Report(_Struct):
    _fields_ = tuple(
        (name, U32)
        for name in (
            "taken",
            "reason",
            "cluster",
            "phase",
            "stage",
            "layer",
            "ticket",
            "slot",
            "count",
        )
    )


class Template(_Struct):
    _fields_ = (
        ("a", TENSOR_MAP * 3 * 2),
        ("sfa", TENSOR_MAP * 3 * 2),
        ("out", TENSOR_MAP * 2 * 2),
        ("tokens", Pointer),
        ("token_scales", Pointer),
        ("expert_ids", Pointer),
        ("expert_weights", Pointer),
        ("result", Pointer),
        ("position", Pointer),
        ("row_of", Pointer),
        ("rows", Pointer),
        ("row_scales", Pointer),
        ("hidden", Pointer),
        ("act", Pointer),
        ("act_scales", Pointer),
        ("down", Pointer),
        ("groups", Pointer),
        ("row_capacity", U32),
        ("_pad", c.c_uint8 * 12),
    )


class Layer(_Struct):
    _fields_ = (
        ("wide", TENSOR_MAP * 2),
        ("narrow", TENSOR_MAP * 2),
        ("scales", Pointer * 2),
        ("_pad", c.c_uint8 * 112),
    )


class Launch(_Struct):
    _fields_ = (
        ("state", Pointer),
        ("templates", Pointer),
        ("layers", Pointer),
        ("arrivals", Pointer),
        ("times", Pointer),
        ("slots", Pointer),
        ("members", Pointer),
        ("tallies", Pointer),
        ("request", Pointer),
        ("trace", Pointer),
        ("trace_count", Pointer),
        ("report", Pointer),
        ("heartbeat", Pointer),
        ("stop", Pointer),
        ("max_ns", U64),
        ("tile_ns", U64),
        ("operation_ns", U64),
        ("n_arrivals", U32),
        ("trace_capacity", U32),
        ("n_slots", U32),
        ("n_layers", U32),
        ("fifo", U32),
        ("coalescing", U32),
        ("window_ns", U64),
        ("stale_ns", U64),
    )
