"""The CPU backend on the tile scheduler: decode preempts prefill at tile boundaries.

Owns: checking and packing weights, translating operations for the engine, its options.
Must not know: where operations come from, shared memory, vLLM.

Worker threads are native (`csrc/cpu/engine.h`): one plays one CTA cluster of the GPU kernel. The
products are torch's oneDNN kernels, called per tile. Rounding is that of vLLM's CPU kernel: fp32
products, activation rounded to the model's dtype.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm_expertplex import _scheduler
from vllm_expertplex._scheduler import MAX_WORKERS, PANEL, Dtype, Engine, Model, Settings
from vllm_expertplex.layout import PHASE_DECODE, PHASE_PREFILL
from vllm_expertplex.moe_server.backend import ExpertWeights, Operation
from vllm_expertplex.moe_server.tiles import decode_tiles, prefill_tiles
from vllm_expertplex.moe_server.trace import write_trace
from vllm_expertplex.quantization import BLOCK

_LIBTORCH = str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
_DTYPES = {
    torch.float32: Dtype.FLOAT32,
    torch.bfloat16: Dtype.BFLOAT16,
    torch.float16: Dtype.FLOAT16,
    torch.float8_e4m3fn: Dtype.FLOAT8,
}
# Events that a trace keeps per worker: the latest ones, 40 bytes each.
_TRACE_EVENTS = 1_000_000


@dataclass(frozen=True, slots=True)
class TileOptions:
    """Scheduling options. Times are in microseconds; 0 workers take all cores of the process. There
    are at most MAX_WORKERS.
    """

    workers: int = 0
    decode_workers: int = 0  # q of eq. (4): decode's share at x_star; 0: most_decode_workers
    most_decode_workers: int = 0  # Q_max; 0: all but one, but all of one or two
    x_star: int = 0  # x_moe* of eq. (4); 0: every local expert active
    quantum: int = 4  # tiles a worker takes from one source in a row
    hold_us: int = 0  # decode workers idle so long between two stages rather than take prefill
    fifo: bool = False  # operations run one after the other, in order of arrival
    coalescing: bool = True  # decode operations of one layer run as one; not if fifo
    window_us: int = 200  # coalescing: how long one decode server waits for another
    stale_us: int = 20_000  # nobody waits for a decode server that has been silent so long
    spin_us: int = 0  # an idle worker polls so long before it sleeps
    deadline_s: float = 60.0  # of one operation
    trace: str | None = None  # file for a Perfetto trace, written by close()


class TilesBackend:
    """Computes operations with preemption. Takes the weights over: packs them in place.

    `activations` is the dtype of x in operations; None: what goes with the weights. ValueError,
    weights untouched, for shapes or dtypes that the tiles cannot do.
    """

    def __init__(
        self,
        layers: Sequence[ExpertWeights],
        options: TileOptions | None = None,
        activations: torch.dtype | None = None,
    ) -> None:
        self._options = options = options or TileOptions()
        self._layers = list(layers)  # the engine keeps addresses only
        first = layers[0]
        self._experts, self._hidden, intermediate = first.w2.shape
        _check(layers)
        stored = first.w13.dtype
        self._dtype = torch.bfloat16 if stored is torch.float8_e4m3fn else stored
        if activations not in (None, self._dtype):
            raise ValueError(
                f"activations are {activations}, but {stored} experts compute from {self._dtype} "
                "in tiles"
            )
        compute = _compute_dtype(stored)
        model = Model(
            self._hidden,
            intermediate,
            self._experts,
            _DTYPES[stored],
            compute,
            _DTYPES[self._dtype],
        )
        for layer in layers:
            for weight in (layer.w13, layer.w2):
                _scheduler.pack(weight.data_ptr(), *weight.shape, _DTYPES[stored], compute)
            scales = (layer.w13_scale, layer.w2_scale)
            model.add_layer(
                layer.w13.data_ptr(),
                layer.w2.data_ptr(),
                *(0 if scale is None else scale.data_ptr() for scale in scales),
            )
        workers = min(options.workers or len(os.sched_getaffinity(0)), MAX_WORKERS)
        most = options.most_decode_workers or (workers if workers <= 2 else workers - 1)
        settings = Settings(
            workers=workers,
            q=options.decode_workers or most,
            q_max=most,
            x_star=options.x_star or self._experts,
            decode=decode_tiles(self._hidden, intermediate, stored.itemsize),
            prefill=prefill_tiles(self._hidden, intermediate),
            quantum=options.quantum,
            hold_ns=options.hold_us * 1000,
            fifo=options.fifo,
            coalescing=options.coalescing,
            window_ns=options.window_us * 1000,
            stale_ns=options.stale_us * 1000,
            spin_ns=options.spin_us * 1000,
            deadline_ns=int(options.deadline_s * 1e9),
            trace_events=_TRACE_EVENTS if options.trace else 0,
        )
        self._engine = Engine(_LIBTORCH, model, settings)

    def submit(self, operations: Sequence[Operation]) -> None:
        """Start operations that became ready together.

        Raises RuntimeError if a worker has failed or an operation has passed its deadline.
        """
        self._engine.submit([self._translate(op) for op in operations])

    def check(self) -> None:
        """Raise RuntimeError as `submit` would: for when there is nothing to submit."""
        self._engine.check()

    def poll(self) -> list[int]:
        """Raise as `check` does; else the values of `backend.COUNTERS`."""
        self.check()
        totals, workers = self._engine.totals(), self._engine.workers()

        def summed(name: str, phase: int | None = None) -> int:
            return sum(w[name] if phase is None else w[name][phase] for w in workers)

        return [
            summed("tiles", PHASE_DECODE),
            summed("tiles", PHASE_PREFILL),
            summed("preemptions"),
            summed("preempt_ns"),
            max(w["preempt_max_ns"] for w in workers),
            summed("idle_ns"),
            summed("busy_ns", PHASE_DECODE),
            summed("busy_ns", PHASE_PREFILL),
            summed("weight_bytes", PHASE_DECODE) + summed("weight_bytes", PHASE_PREFILL),
            totals["coalesced"],
            totals["decode_share"],
            totals["decode_share_last"],
        ]

    def close(self) -> None:
        """Stop after the tiles that are being computed, and write the trace."""
        self._engine.stop()
        if self._options.trace:
            write_trace(Path(self._options.trace), self._engine.trace())

    def stats(self) -> dict[str, object]:
        """Counters since the start: of operations, and of each worker."""
        return {**self._engine.totals(), "workers": self._engine.workers()}

    def _translate(self, op: Operation) -> tuple[object, ...]:
        tokens, topk = op.topk_ids.shape
        if op.x.dtype is not self._dtype or op.x.shape != (tokens, self._hidden):
            raise ValueError(
                f"operation of source {op.source}: x is {op.x.dtype} {tuple(op.x.shape)}, expected "
                f"{self._dtype} {(tokens, self._hidden)} like the expert weights"
            )
        return (
            op.source,
            op.phase,
            op.layer,
            tokens,
            topk,
            op.x.data_ptr(),
            op.topk_ids.data_ptr(),
            op.out.data_ptr(),
            op,
        )


def _compute_dtype(stored: torch.dtype) -> Dtype:
    """The dtype of the products: bf16 where model and processor have it, else fp32."""
    wants_bf16 = stored in (torch.bfloat16, torch.float8_e4m3fn)
    if wants_bf16 and _scheduler.supports(_LIBTORCH, Dtype.BFLOAT16):
        return Dtype.BFLOAT16
    if _scheduler.supports(_LIBTORCH, Dtype.FLOAT32):
        return Dtype.FLOAT32
    raise ValueError(
        "this processor has no oneDNN micro-kernels (they need AVX2); use the torch backend"
    )


def _check(layers: Sequence[ExpertWeights]) -> None:
    experts, hidden, intermediate = layers[0].w2.shape
    dtype = layers[0].w13.dtype
    if dtype not in _DTYPES:
        raise ValueError(f"expert weights are {dtype}, expected one of {[str(d) for d in _DTYPES]}")
    if hidden % PANEL or intermediate % PANEL:
        raise ValueError(
            f"hidden size {hidden} and intermediate size {intermediate} must be multiples of "
            f"{PANEL} for the tiles backend; use the torch backend"
        )
    up_blocks, hidden_blocks = -(-intermediate // BLOCK), -(-hidden // BLOCK)
    expected = {
        "w13": ((experts, 2 * intermediate, hidden), dtype),
        "w2": ((experts, hidden, intermediate), dtype),
    }
    if dtype is torch.float8_e4m3fn:
        expected["w13_scale"] = ((experts, 2 * up_blocks, hidden_blocks), torch.float32)
        expected["w2_scale"] = ((experts, hidden_blocks, up_blocks), torch.float32)
    for index, layer in enumerate(layers):
        for name, (shape, wanted) in expected.items():
            tensor = getattr(layer, name)
            if tensor is None or tuple(tensor.shape) != shape or tensor.dtype is not wanted:
                found = "missing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
                raise ValueError(f"layer {index}: {name} is {found}, expected {wanted} {shape}")
            if not tensor.is_contiguous():
                raise ValueError(f"layer {index}: {name} is not contiguous")


assert (_scheduler.DECODE, _scheduler.PREFILL) == (PHASE_DECODE, PHASE_PREFILL)
