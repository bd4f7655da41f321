"""Two kernels on one GPU, timed on the device: what the ways of sharing it are measured with.

Owns: kernels that wait and note the time, and DeepGEMM's kernels for prefill and decode of Fig.
11/12. Must not know: by what means the two share the GPU.
"""

from __future__ import annotations

import ctypes
import subprocess
from typing import NamedTuple

import torch
from common import MODELS, random_scales
from cuda.bindings import driver as cu
from deepgemm import Config, DeepGemm
from fig13 import fill, peer

from vllm_expertplex.moe_server.apk.buffers import LayerWeights, OperationTemplate
from vllm_expertplex.moe_server.apk.driver import check
from vllm_expertplex.moe_server.apk.jit import KernelShape, Toolchain, cache_dir

DELAY_US = 10  # decode comes so long after prefill
EXPERTS = 8
_SOURCE = """
__device__ unsigned long long now() {
  unsigned long long t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); return t; }
extern "C" __global__ void stamp(unsigned long long* t) { *t = now(); }
extern "C" __global__ void delay(unsigned long long ns) {
  for (unsigned long long end = now() + ns; now() < end;) {} }
extern "C" __global__ void until(unsigned long long ns) { while (now() < ns) {} }
"""


class Reading(NamedTuple):
    """One reading of the paper's shapes: rows per expert."""

    name: str
    prefill: int
    decode: int

    @property
    def capacity(self) -> int:
        """Decode's rows of an expert in the masked layout."""
        return -(-self.decode // 64) * 64


READINGS = (Reading("per expert", 8192, 128), Reading("in total", 1024, 16))


def shape() -> KernelShape:
    return KernelShape(*MODELS["GLM-5.1"], experts=EXPERTS, top_k=8)


class Helpers:
    """`stamp(address)`: notes the GPU's clock; `delay(ns)`, `until(ns)`: wait. Usable from any
    context of the device.
    """

    def __init__(self) -> None:
        cubin = cache_dir() / "pair-helpers.cubin"
        if not cubin.exists():
            source = cubin.with_suffix(".cu")
            source.write_text(_SOURCE)
            command = [Toolchain.find().nvcc, "-cubin", "-arch=sm_90", str(source), "-o"]
            subprocess.run([*command, str(cubin)], check=True)
        library = check(
            cu.cuLibraryLoadData(cubin.read_bytes(), [], [], 0, [], [], 0), "loading helpers"
        )
        self._kernels = {
            n: check(cu.cuLibraryGetKernel(library, n.encode()), n)
            for n in ("stamp", "delay", "until")
        }

    def launch(self, name: str, value: int, stream: int) -> None:
        argument = ctypes.c_uint64(value)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        kernel = cu.CUfunction(int(self._kernels[name]))
        check(
            cu.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, ctypes.addressof(pointers), 0),
            name,
        )


def prefill_template(reading: Reading) -> OperationTemplate:
    rows, device = reading.prefill, torch.device("cuda", 0)
    op = OperationTemplate(shape(), 1, True, device, rows=EXPERTS * rows)
    fill(op)
    op.set_groups([rows] * EXPERTS)
    return op


def decode_template(reading: Reading) -> OperationTemplate:
    c, device = reading.capacity, torch.device("cuda", 0)
    op = OperationTemplate(shape(), 1, False, device, rows=EXPERTS * c + 64)
    fill(op)
    op.set_groups([reading.decode] * EXPERTS, [c * e for e in range(EXPERTS + 1)])
    return op


def prefill_peer(
    reading: Reading, op: OperationTemplate, layer: LayerWeights, sms: int = 132
) -> DeepGemm:
    """DeepGEMM's GateUp for the operands of `op`, on `sms` SMs."""
    weights, scales, rows = layer.weights[0], layer.scales[0], reading.prefill
    assert scales is not None
    n, k = weights.shape[1:]
    layout = torch.arange(EXPERTS, device="cuda", dtype=torch.int32).repeat_interleave(rows)
    return peer(Config(n, k, EXPERTS, False, 128, 192, 4, 2, sms)).bind(
        op.rows, op.row_scales, weights.view(-1, k), scales, op.hidden, layout, EXPERTS * rows
    )


def decode_peer(
    reading: Reading, op: OperationTemplate, layer: LayerWeights, sms: int = 132
) -> DeepGemm:
    """The same in the masked layout."""
    weights, scales = layer.weights[0], layer.scales[0]
    assert scales is not None
    n, k = weights.shape[1:]
    valid = torch.full((EXPERTS,), reading.decode, device="cuda", dtype=torch.int32)
    sfa = random_scales(EXPERTS * (k // 128), reading.capacity)
    tile, stages = (128, 5) if reading.decode > 64 else (64, 8)
    return peer(Config(n, k, EXPERTS, True, tile, 128, stages, 1, sms)).bind(
        op.rows, sfa, weights.view(-1, k), scales, op.hidden, valid, reading.capacity
    )
