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
# By whether an operation is small: columns of a token that a warp takes at a time, and the most
# CTAs, one per SM. Eight SMs saturate NVLink with plain copies; dispatch also reads twice what it
# sends, and converts it: 71 % of the link with 32 CTAs, 81 % with 64, 83 % with all.
_DISPATCH = {True: (512, 24), False: (1536, 64)}
_COMBINE = {True: (512, 48), False: (1024, 32)}

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


class CombineArguments(_Struct):
    _fields_ = (
        ("peers", Peers),
        ("out", Pointer),
        ("timeout_ns", U64),
        ("tokens", U32),
        ("word", U32),
    )


_MIRRORED = (State, Lost, DispatchArguments, CombineArguments)


def kernels_path() -> Any:
    """The cubin, compiled now if it is not in the cache (a second)."""
    folder = csrc() / "attention"
    return cubin(folder / "kernels.cu", list(folder.glob("*.cuh")))


class PeerKernels:
    """The kernels on the current device, for large operations or `small` ones.

    Small ones (decode) are for low latency: spread thinly, combine waits for the MoE servers
    itself, and each kernel may be there before the one ahead of it in the stream has ended
    (programmatic dependent launch). Large ones (prefill) leave the SMs to others while they wait.
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
        dispatch = f"expertplex_dispatch_{'fp8' if fp8 else 'bf16'}"
        self._dispatch = module.function(dispatch), module.function(f"{dispatch}_small")
        self._wait = module.function("expertplex_wait_done")
        self._combine = module.function("expertplex_combine")
        self._wait_and_combine = module.function("expertplex_wait_and_combine")

    def dispatch(self, arguments: DispatchArguments, small: bool) -> None:
        self._rows(self._dispatch[small], arguments, *_DISPATCH[small], small)

    def combine(self, arguments: CombineArguments, small: bool) -> None:
        """WaitDone, then combine."""
        if small:
            self._rows(self._wait_and_combine, arguments, *_COMBINE[True], True)
            return
        launch(self._wait, 1, MAX_SERVERS, 0, torch.cuda.current_stream(), arguments)
        self._rows(self._combine, arguments, *_COMBINE[False], False)

    @staticmethod
    def _rows(function: Any, arguments: Any, columns: int, most: int, dependent: bool) -> None:
        """A kernel whose warps take `columns` of a token at a time."""
        items = arguments.tokens * -(-arguments.peers.hidden // columns)
        ctas = max(1, min(most, -(-items // _WARPS)))
        stream = torch.cuda.current_stream()
        launch(function, ctas, _WARPS * 32, 0, stream, arguments, dependent=dependent)
