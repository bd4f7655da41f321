"""The few CUDA driver calls the kernel needs, with errors that say what failed."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver as cu

_TYPES = {
    torch.float8_e4m3fn: cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    torch.bfloat16: cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    torch.float32: cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
}


def check(result: tuple[Any, ...], what: str) -> Any:
    """Unpacks a driver call's result. Raises RuntimeError with `what` and the driver's error."""
    status, *values = result
    if status != cu.CUresult.CUDA_SUCCESS:
        _, name = cu.cuGetErrorString(status)
        raise RuntimeError(f"{what} failed: {name.decode() if name else status} ({int(status)})")
    return values[0] if len(values) == 1 else tuple(values)


def tensor_map(matrix: torch.Tensor, box_rows: int, box_columns: int, swizzle: bool) -> bytes:
    """The 128-byte TMA descriptor of a row-major matrix, moved in boxes of the given size."""
    rows, columns = matrix.shape
    none = cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE
    encoded = check(
        cu.cuTensorMapEncodeTiled(
            _TYPES[matrix.dtype],
            2,
            matrix.data_ptr(),
            [cu.cuuint64_t(columns), cu.cuuint64_t(rows)],
            [cu.cuuint64_t(matrix.stride(0) * matrix.element_size())],
            [cu.cuuint32_t(box_columns), cu.cuuint32_t(box_rows)],
            [cu.cuuint32_t(1), cu.cuuint32_t(1)],
            cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B if swizzle else none,
            cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        f"encoding the TMA descriptor of a {rows} x {columns} {matrix.dtype} matrix, "
        f"box {box_rows} x {box_columns}",
    )
    return ctypes.string_at(int(encoded.getPtr()), 128)


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
