"""The experts of a MoE server on its GPU, behind the resident kernel.

Owns: what the kernel needs of weights and slots, its launch, its health, its counters. Attention
servers reach it through their slots; no operation passes through Python.
Must not know: vLLM, the server's process, HTTP.

Nothing is allocated, freed or loaded once the kernel runs, and no other kernel is started: the
loop above only looks at words that the kernel writes into host memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from vllm_expertplex.comm.peer import SlotLayout
from vllm_expertplex.layout import Server, SlotOwner
from vllm_expertplex.moe_server.apk.buffers import LayerWeights, buffer_bytes
from vllm_expertplex.moe_server.apk.jit import KernelShape
from vllm_expertplex.moe_server.apk.kernel import PersistentKernel
from vllm_expertplex.moe_server.apk.report import KernelHang
from vllm_expertplex.moe_server.apk.resident import ABORT, DRAIN, ResidentRun
from vllm_expertplex.moe_server.backend import ExpertWeights
from vllm_expertplex.moe_server.slots import Slots

# The kernel writes its heartbeat every few microseconds; a GPU that is shared may stop it for
# milliseconds at a time.
_SILENT_S = 5.0
_DRAIN_S = 2.0


class CudaBackend:
    """Experts on the current GPU. `layouts`: the slots of `owners`, in their order.

    ValueError for weights that the kernel cannot compute from; RuntimeError where the GPU has too
    little memory, with both amounts.
    """

    def __init__(
        self,
        run_dir: Path,
        me: Server,
        layers: Sequence[ExpertWeights],
        owners: Sequence[SlotOwner],
        layouts: Sequence[SlotLayout],
        operation_s: float,
        max_ms: int = 0,
        decode_sms: int = 0,
        expected_x_moe: int = 1,
        fifo: bool = False,
        coalescing: bool = True,
    ) -> None:
        shape = kernel_shape(layers, layouts)
        self._me, self._operation_ms, self._max_ms = me, int(operation_s * 1e3), max_ms
        self._kernel = PersistentKernel(shape)
        self._budget = self._kernel.budget(decode_sms, expected_x_moe)
        self._layers = [LayerWeights(shape, w.w13, w.w2, w.w13_scale, w.w2_scale) for w in layers]
        self._refuse_too_much(shape, layouts)
        self._fifo, self._coalescing = fifo, coalescing
        self._slots = Slots(run_dir, me, owners, layouts, shape, self._kernel.device)
        self._run: ResidentRun | None = None

    def _refuse_too_much(self, shape: KernelShape, layouts: Sequence[SlotLayout]) -> None:
        needed = sum(x.size + buffer_bytes(shape, x.max_tokens) for x in layouts)
        free, _ = torch.cuda.mem_get_info()
        if needed > free:
            raise RuntimeError(
                f"{self._me.name}: slots and buffers for steps of "
                f"{', '.join(str(x.max_tokens) for x in layouts)} tokens need "
                f"{needed / 2**30:.1f} GiB of GPU memory, {free / 2**30:.1f} GiB are free beside "
                "the experts; lower --max-num-batched-tokens, or use more MoE servers"
            )

    def start(self, timeout_s: float) -> None:
        """Meets the attention servers and launches the kernel. Raises TimeoutError naming one that
        does not come.
        """
        served = self._slots.connect(timeout_s)
        self._run = ResidentRun(
            self._kernel,
            served,
            self._layers,
            self._budget,
            fifo=self._fifo,
            coalescing=self._coalescing,
            operation_ms=self._operation_ms,
            max_ms=self._max_ms,
        )
        self._run.launch()
        self._heard, self._heard_at = 0, time.monotonic()

    def poll(self) -> tuple[list[int], str | None]:
        """The values of `backend.COUNTERS`, and what the kernel complains of but survives.

        Raises KernelHang, naming what it was doing, where it has ended or fallen silent.
        """
        run = self._run
        assert run is not None, "start() first"
        warning = run.check()
        if not run.running:
            raise KernelHang(f"{self._me.name}: the kernel has ended without being told to")
        now = time.monotonic()
        if (beat := run.heartbeat_ns) != self._heard:
            self._heard, self._heard_at = beat, now
        elif now - self._heard_at > _SILENT_S:
            raise KernelHang(
                f"{self._me.name}: the kernel has been silent for {now - self._heard_at:.1f} s "
                "(its heartbeat is due every few microseconds); see nvidia-smi and dmesg"
            )
        did = run.tallies()
        counters = [
            did.tiles_decode,
            did.tiles_prefill,
            did.preemptions,
            did.preempt_ns,
            did.preempt_max_ns,
            did.idle_ns,
            did.busy_decode_ns,
            did.busy_prefill_ns,
            did.weight_bytes,
            did.coalesced,
            run.budget.q // run.budget.cluster,
            did.decode_clusters,
        ]
        return counters, warning

    def close(self) -> None:
        """Ends the kernel: at the end of what it has begun, or soon."""
        run = self._run
        if run is None or not run.running:
            return
        run.stop(DRAIN)
        deadline = time.monotonic() + _DRAIN_S
        while run.running and time.monotonic() < deadline:
            time.sleep(0.001)
        run.stop(ABORT)
        run.wait()


def kernel_shape(layers: Sequence[ExpertWeights], layouts: Sequence[SlotLayout]) -> KernelShape:
    """What the kernel is compiled for. Raises ValueError naming what it cannot compute from."""
    first = layers[0]
    experts, hidden, intermediate = first.w2.shape
    dtype = first.w13.dtype
    if dtype not in (torch.float8_e4m3fn, torch.bfloat16):
        raise ValueError(
            f"expert weights are {dtype}; on GPUs MoE servers compute from bfloat16, or from FP8 "
            "in 128x128 blocks"
        )
    for index, layer in enumerate(layers):
        found = (layer.w13.shape, layer.w2.shape, layer.w13.dtype, layer.w2.dtype)
        expected = (first.w13.shape, first.w2.shape, dtype, dtype)
        if found != expected:
            raise ValueError(
                f"layer {index}: expert weights are {found}, but those of layer 0 {expected}; all "
                "layers of a model must be alike"
            )
    fp8 = dtype is torch.float8_e4m3fn
    for layout in layouts:
        if (layout.hidden, layout.fp8) != (hidden, fp8):
            raise ValueError(f"slots {layout} do not fit {dtype} experts of {hidden} columns")
    return KernelShape(hidden, intermediate, experts, layouts[0].topk, bf16=not fp8)
