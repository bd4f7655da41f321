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
    grid: int | tuple[int, int],
    block: int,
    shared_bytes: int,
    stream: torch.cuda.Stream,
    *arguments: Any,
    dependent: bool = False,
) -> None:
    """Launches with arguments that are ctypes values or structures, passed by value.

    `dependent`: the kernel may start before the one ahead of it in the stream has ended, and waits
    for it itself (programmatic dependent launch).
    """
    pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
    config = cu.CUlaunchConfig()
    x, y = grid if isinstance(grid, tuple) else (grid, 1)
    config.gridDimX, config.gridDimY, config.gridDimZ = x, y, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = stream.cuda_stream
    if dependent:
        config.attrs, config.numAttrs = [_DEPENDENT], 1
    check(
        cu.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0),
        f"launching {grid} x {block} threads with {shared_bytes} B of shared memory",
    )


def _dependent_launch() -> cu.CUlaunchAttribute:
    attribute = cu.CUlaunchAttribute()
    ids = cu.CUlaunchAttributeID
    attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


_DEPENDENT = _dependent_launch()
