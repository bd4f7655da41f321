"""The peer: DeepGEMM's own FP8 grouped GEMM kernel, built from the `sgl-deep-gemm` headers.

DeepGEMM's Python layer needs the torch it was built for, so its kernel is instantiated here with
the tile shapes its
heuristics choose on Hopper (128x192 with cluster 2 for the contiguous layout, 64xN for the masked
one).
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import NamedTuple

import torch
from cuda.bindings import driver as cu

from vllm_expertplex.moe_server.apk.driver import check, tensor_map
from vllm_expertplex.moe_server.apk.jit import Toolchain

_SOURCE = """#include <deep_gemm/impls/sm90_fp8_gemm_1d2d.cuh>
using namespace deep_gemm;
auto kernel = &sm90_fp8_gemm_1d2d_impl<cute::UMMA::Major::K, 0, {n}, {k}, {groups}, {block_m},
{block_n}, 128, 128,
    128, 128, {stages}, 128, {math}, {multicast}, false, {sms}, GemmType::{kind},
    cutlass::bfloat16_t>;
"""


class Config(NamedTuple):
    """One instantiation of `sm90_fp8_gemm_1d2d_impl`."""

    n: int
    k: int
    groups: int
    masked: bool
    block_m: int
    block_n: int
    stages: int
    multicast: int
    sms: int = 132

    @property
    def name(self) -> str:
        kind = "masked" if self.masked else "contiguous"
        tile = f"{self.block_m}x{self.block_n}_s{self.stages}_c{self.multicast}"
        return f"{kind}_{self.n}_{self.k}_{self.groups}_{tile}_{self.sms}"

    def build(self, out: Path, tools: Toolchain) -> None:
        source = out.with_suffix(".cu")
        source.write_text(
            _SOURCE.format(
                **self._asdict(),
                math=128 if self.block_m <= 64 else 256,
                kind="MGroupedMasked" if self.masked else "MGroupedContiguous",
            )
        )
        command = [
            tools.nvcc,
            "-std=c++20",
            "-cubin",
            "-gencode=arch=compute_90a,code=sm_90a",
            f"-I{tools.include}",
            "--expt-relaxed-constexpr",
            "--expt-extended-lambda",
            "-O3",
            "--diag-suppress=39,161,174,177,186,940",
            "--ptxas-options=--register-usage-level=10",
            str(source),
            "-o",
            str(out),
        ]
        subprocess.run(command, check=True, capture_output=True, text=True)

    @property
    def shared_bytes(self) -> int:
        def up(x: int, a: int) -> int:
            return -(-x // a) * a

        tiles = (
            up(self.block_m * self.block_n * 2, 1024)
            + self.stages * (self.block_m + self.block_n) * 128
        )
        scale_rows = 1 if 128 % self.block_n == 0 else 2
        scales = self.stages * up(self.block_m * 4, 128) + up(self.k // 128 * scale_rows * 4, 8)
        return tiles + scales + 2 * self.stages * 8


class DeepGemm:
    """A loaded instantiation. `launch(a, sfa, b, sfb, out, layout)` queues it on the current
    stream.
    """

    def __init__(self, config: Config, cubin: Path) -> None:
        self.config = config
        torch.cuda.current_stream().synchronize()  # makes the context
        # A library's kernels run in any context of the device, so also in a Green Context.
        library = check(
            cu.cuLibraryLoadData(cubin.read_bytes(), [], [], 0, [], [], 0), f"loading {cubin}"
        )
        kernel = check(cu.cuLibraryEnumerateKernels(1, library), "finding DeepGEMM's kernel")[0]
        limit = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        device = check(cu.cuDeviceGet(torch.cuda.current_device()), "device")
        check(cu.cuKernelSetAttribute(limit, config.shared_bytes, kernel, device), "shared memory")
        self._function = cu.CUfunction(int(kernel))

    def bind(
        self,
        a: torch.Tensor,
        sfa: torch.Tensor,
        b: torch.Tensor,
        sfb: torch.Tensor,
        out: torch.Tensor,
        layout: torch.Tensor,
        rows: int,
    ) -> DeepGemm:
        """`rows`: M, per group if masked. `layout`: int32 expert per row, or valid rows per group
        if masked.
        """
        c = self.config
        maps = [
            tensor_map(a, c.block_m, 128, True),
            tensor_map(b, c.block_n, 128, True),
            tensor_map(out, c.block_m, 64, True),
            tensor_map(sfa, 1, c.block_m, False),
        ]
        values: list[ctypes.Array[ctypes.c_uint8] | ctypes.c_uint64 | ctypes.c_uint32] = [
            ctypes.c_uint64(sfb.data_ptr()),
            ctypes.c_uint64(layout.data_ptr()),
            ctypes.c_uint32(rows),
            ctypes.c_uint32(c.n),
            ctypes.c_uint32(c.k),
        ]
        values += [(ctypes.c_uint8 * 128).from_buffer_copy(m) for m in maps]
        self._values, self._tensors = values, (a, sfa, b, sfb, out, layout)
        self._pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        return self

    def launch(self, stream: int | None = None) -> None:
        c, config = self.config, cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = c.sms, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = (
            128 + (128 if c.block_m <= 64 else 256),
            1,
            1,
        )
        config.sharedMemBytes = c.shared_bytes
        config.hStream = torch.cuda.current_stream().cuda_stream if stream is None else stream
        if c.multicast > 1:
            attribute = cu.CUlaunchAttribute()
            attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            attribute.value.clusterDim.x = c.multicast
            attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1
            config.attrs, config.numAttrs = [attribute], 1
        check(
            cu.cuLaunchKernelEx(config, self._function, ctypes.addressof(self._pointers), 0),
            f"launching DeepGEMM {c.name}",
        )
