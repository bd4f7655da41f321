"""The attention side's kernels as calls: dispatch, WaitDone, combine (`csrc/attention/`).

Owns: building and loading them, their argument structures, how many CTAs each gets.
Must not know: processes, layers' names, when to call what.
"""

from __future__ import annotations

import ctypes as c
from typing import Any

import torch

from vllm_expertplex.cuda.driver import Module, launch
from vllm_expertplex.cuda.nvcc import csrc, cubin

MAX_SERVERS, MAX_EXPERTS = 32, 1024
_WARPS = 16  # per CTA
_DISPATCH_COLUMNS, _COMBINE_COLUMNS = 1536, 1024  # per warp and step
# The most CTAs, one per SM. Eight SMs saturate NVLink either way; dispatch also reads twice what it
# sends, and converts it.
_DISPATCH_CTAS, _COMBINE_CTAS = 32, 48

U32, U64, Pointer = c.c_uint32, c.c_uint64, c.c_uint64


class _Struct(c.Structure):
    pass


class State(_Struct):
    _fields_ = (("sequence", U32), ("arrived", U32), ("lost", U32), ("reserved", U32))


class Lost(_Struct):
    """All zero while all is well; `servers` has a bit per MoE server that missed its deadline."""

    _fields_ = (("servers", U32), ("layer", U32), ("sequence", U32), ("tokens", U32))


class Offsets(_Struct):
    _fields_ = tuple((name, U64) for name in ("tokens", "scales", "ids", "weights", "result"))


class Peers(_Struct):
    _fields_ = (
        ("slots", Pointer * MAX_SERVERS),
        ("done", Pointer),
        ("state", Pointer),
        ("masks", Pointer),
        ("lost", Pointer),
        ("at", Offsets),
        ("servers", U32),
        ("hidden", U32),
        ("topk", U32),
        ("experts", U32),
    )


class DispatchArguments(_Struct):
    _fields_ = (
        ("peers", Peers),
        ("x", Pointer),
        ("ids", Pointer),
        ("weights", Pointer),
        ("places", Pointer),
        ("tokens", U32),
        ("word", U32),
    )


class WaitArguments(_Struct):
    _fields_ = (("peers", Peers), ("timeout_ns", U64), ("word", U32), ("reserved", U32))


class CombineArguments(_Struct):
    _fields_ = (("peers", Peers), ("out", Pointer), ("tokens", U32), ("reserved", U32))


_MIRRORED = (State, Lost, DispatchArguments, WaitArguments, CombineArguments)


def kernels_path() -> Any:
    """The cubin, compiled now if it is not in the cache (a second)."""
    folder = csrc() / "attention"
    return cubin(folder / "kernels.cu", list(folder.glob("*.cuh")))


class PeerKernels:
    """The kernels on the current device. `dependent` launches may begin before the kernel ahead
    of them in the stream has ended (programmatic dependent launch): for decode, where launches
    dominate; a combine that waits holds registers of many SMs.
    """

    def __init__(self, fp8: bool) -> None:
        module = Module(kernels_path())
        sizes = module.words("expertplex_attention_sizes")
        expected = [c.sizeof(struct) for struct in _MIRRORED]
        if sizes != expected:
            raise RuntimeError(
                f"argument sizes are {expected} here and {sizes} in csrc/attention: the package "
                "and its CUDA sources are of different versions"
            )
        self._dispatch = module.function(f"expertplex_dispatch_{'fp8' if fp8 else 'bf16'}")
        self._wait = module.function("expertplex_wait_done")
        self._combine = module.function("expertplex_combine")

    def dispatch(self, arguments: DispatchArguments, dependent: bool) -> None:
        steps = -(-arguments.peers.hidden // _DISPATCH_COLUMNS)
        self._launch(self._dispatch, arguments.tokens * steps, _DISPATCH_CTAS, arguments, dependent)

    def wait(self, arguments: WaitArguments, dependent: bool) -> None:
        stream = torch.cuda.current_stream()
        launch(self._wait, 1, MAX_SERVERS, 0, stream, arguments, dependent=dependent)

    def combine(self, arguments: CombineArguments, dependent: bool) -> None:
        steps = -(-arguments.peers.hidden // _COMBINE_COLUMNS)
        self._launch(self._combine, arguments.tokens * steps, _COMBINE_CTAS, arguments, dependent)

    @staticmethod
    def _launch(function: Any, items: int, most: int, arguments: Any, dependent: bool) -> None:
        ctas = max(1, min(most, -(-items // _WARPS)))
        stream = torch.cuda.current_stream()
        launch(function, ctas, _WARPS * 32, 0, stream, arguments, dependent=dependent)
