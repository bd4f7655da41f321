"""The few CUDA driver calls the kernels need, with errors that say what failed.

Owns: loading cubins, launching. Must not know: what the kernels do.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver as cu


def check(result: tuple[Any, ...], what: str) -> Any:
    """Unpacks a driver call's result. Raises RuntimeError with `what` and the driver's error."""
    status, *values = result
    if status != cu.CUresult.CUDA_SUCCESS:
        _, name = cu.cuGetErrorString(status)
        raise RuntimeError(f"{what} failed: {name.decode() if name else status} ({int(status)})")
    return values[0] if len(values) == 1 else tuple(values)


class Module:
    """A loaded cubin. Loading needs a current context, which torch makes on its first CUDA call."""

    def __init__(self, cubin: Path) -> None:
        torch.cuda.current_stream().synchronize()  # makes the context
        self._module = check(cu.cuModuleLoadData(cubin.read_bytes()), f"loading {cubin}")

    def function(self, name: str, shared_bytes: int = 0) -> Any:
        found = check(cu.cuModuleGetFunction(self._module, name.encode()), f"finding kernel {name}")
        if shared_bytes:
            limit = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(
                cu.cuFuncSetAttribute(found, limit, shared_bytes),
                f"{name}: {shared_bytes} B of shared memory",
            )
        return found

    def words(self, name: str) -> list[int]:
        """A `__device__ const uint32_t[]` of the module."""
        address, size = check(cu.cuModuleGetGlobal(self._module, name.encode()), f"finding {name}")
        host = (ctypes.c_uint32 * (int(size) // 4))()
        check(cu.cuMemcpyDtoH(ctypes.addressof(host), address, int(size)), f"reading {name}")
        return list(host)


def launch(
    function: Any,
    grid: int,
    block: int,
    shared_bytes: int,
    stream: torch.cuda.Stream,
    *arguments: Any,
) -> None:
    """Launches with arguments that are ctypes values or structures, passed by value."""
    pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
    check(
        cu.cuLaunchKernel(
            function,
            grid,
            1,
            1,
            block,
            1,
            1,
            shared_bytes,
            stream.cuda_stream,
            ctypes.addressof(pointers),
            0,
        ),
        f"launching {grid} x {block} threads with {shared_bytes} B of shared memory",
    )
