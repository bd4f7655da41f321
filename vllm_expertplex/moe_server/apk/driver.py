"""Tensor maps, beside the driver calls that all kernels share."""

from __future__ import annotations

import ctypes

import torch
from cuda.bindings import driver as cu

from vllm_expertplex.cuda.driver import Module, check, launch

__all__ = ["Module", "check", "launch", "tensor_map"]

_TYPES = {
    torch.float8_e4m3fn: cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    torch.bfloat16: cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    torch.float32: cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
}


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
