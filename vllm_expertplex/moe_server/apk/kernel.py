"""Loads the persistent kernel, and runs it over a list of operations (a finite run)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from . import structs
from .buffers import LayerWeights, OperationTemplate, to_device
from .driver import Module, launch
from .jit import KernelShape, kernel_path
from .report import KernelHang, ReportWord, describe

THREADS = 384
_MIRRORED = {
    2: structs.Template,
    3: structs.Layer,
    4: structs.Arrival,
    5: structs.TileTime,
    6: structs.Launch,
    8: structs.Config,
    9: structs.Times,
    10: structs.ServedSlot,
    11: structs.Report,
    12: structs.Members,
}


class TileTime(NamedTuple):
    cluster: int
    began: int
    ended: int
    phase: int
    stage: int
    identity: int


class RunTimes(NamedTuple):
    """Of one run: per operation (submitted, first tile, done), ns of the GPU's clock; tiles if
    traced.
    """

    operations: list[tuple[int, int, int]]
    tiles: list[TileTime]
    kernel_us: float


class PersistentKernel:
    """The kernel of one model's shapes on the current device."""

    def __init__(
        self, shape: KernelShape, cubin: Path | None = None, clusters: int | None = None
    ) -> None:
        self.shape = shape
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.clusters = clusters or self.sms // 2
        if not self.clusters:
            raise RuntimeError(
                f"this process may use {self.sms} SM of its GPU, and the kernel runs on pairs of "
                "them: raise moe_sm_percent, or put fewer MoE servers on a GPU"
            )
        self._module = Module(cubin or kernel_path(shape))
        sizes = self._module.words("expertplex_apk_sizes")
        for index, struct in _MIRRORED.items():
            if sizes[index] != ctypes.sizeof(struct):
                raise RuntimeError(
                    f"{struct.__name__}: {ctypes.sizeof(struct)} B here, {sizes[index]} B in the "
                    "kernel: rebuild it"
                )
        self.shared_bytes = sizes[7]
        self._main = self._module.function("expertplex_apk", self.shared_bytes)
        self._init = self._module.function("expertplex_apk_init")
        self.state_bytes = sizes[0]
        self._report = ReportWord()
        self._words = torch.zeros(64, dtype=torch.int64, pin_memory=True)  # heartbeat, stop

    def budget(self, q: int = 0, x_star: int = 1) -> structs.Budget:
        """Decode's share of this GPU; see `structs.decode_share`."""
        return structs.decode_share(2 * self.clusters, q, x_star)

    def initialise(self, state: torch.Tensor, config: structs.Config) -> None:
        """Scheduler state in zeroed device memory, on the current stream."""
        stream = torch.cuda.current_stream()
        launch(self._init, 1, 1, 0, stream, ctypes.c_uint64(state.data_ptr()), config)

    def start(self, arguments: structs.Launch, stream: torch.cuda.Stream) -> None:
        launch(self._main, 2 * self.clusters, THREADS, self.shared_bytes, stream, arguments)

    def prepare(
        self,
        templates: Sequence[OperationTemplate],
        layers: Sequence[LayerWeights],
        arrivals: Sequence[tuple[int, int, structs.Operation]],
        budget: structs.Budget | None = None,
        after: Sequence[int | None] | None = None,
        hold_ns: int = 0,
        quantum: int = 1 << 20,
        max_ms: int = 1000,
        tile_ms: int = 100,
        trace: int = 0,
    ) -> FiniteRun:
        """A run that submits each (ns after start, phase, operation) and ends when all are done.
        `after`: the
        identity of an operation that must have ended before, per arrival."""
        return FiniteRun(
            self,
            templates,
            layers,
            arrivals,
            budget,
            hold_ns,
            quantum,
            max_ms,
            tile_ms,
            trace,
            after,
        )


class FiniteRun:
    """Device copies of what one run needs, so that a launch is one copy and one kernel."""

    def __init__(
        self,
        kernel: PersistentKernel,
        templates: Sequence[OperationTemplate],
        layers: Sequence[LayerWeights],
        arrivals: Sequence[tuple[int, int, structs.Operation]],
        budget: structs.Budget | None,
        hold_ns: int,
        quantum: int,
        max_ms: int,
        tile_ms: int,
        trace: int,
        after: Sequence[int | None] | None,
    ) -> None:
        k, device = kernel, kernel.device
        self.kernel, self.trace = kernel, trace
        self.n = len(arrivals)
        self._templates = to_device([t.struct for t in templates], device)
        self._layers = to_device([w.struct for w in layers], device)
        waits = after or [None] * self.n
        self._arrivals = to_device(
            [
                structs.Arrival(op, ns, phase, 0xFFFFFFFF if w is None else w)
                for (ns, phase, op), w in zip(arrivals, waits, strict=True)
            ],
            device,
        )
        self._trace = torch.zeros(k.clusters * trace * 4 + 1, dtype=torch.int64, device=device)
        self._traced = torch.zeros(k.clusters, dtype=torch.int32, device=device)
        config = structs.Config(k.clusters, quantum, hold_ns, budget or k.budget())
        # What a run starts from, made once: a launch is then one copy and one kernel. After the
        # state: times, and the word that tells the controller to stop.
        end = k.state_bytes + self.n * 24
        self._live = torch.zeros(end + 8, dtype=torch.uint8, device=device)
        k.initialise(self._live, config)
        self._initial = self._live.clone()
        self._times = self._live[k.state_bytes : end].view(torch.int64).view(self.n, 3)
        self.arguments = structs.Launch(
            state=self._live.data_ptr(),
            templates=self._templates.data_ptr(),
            layers=self._layers.data_ptr(),
            arrivals=self._arrivals.data_ptr(),
            times=self._times.data_ptr(),
            request=self._live.data_ptr() + end,
            trace=self._trace.data_ptr() if trace else 0,
            trace_count=self._traced.data_ptr(),
            report=k._report.address,
            heartbeat=k._words.data_ptr(),
            stop=k._words.data_ptr() + 64,
            max_ns=max_ms * 1_000_000,
            tile_ns=tile_ms * 1_000_000,
            n_arrivals=self.n,
            trace_capacity=trace,
            n_layers=len(layers),
        )

    def launch(self, stream: torch.cuda.Stream | None = None) -> None:
        """Queues the run on `stream` (capturable in a CUDA graph)."""
        k, on = self.kernel, stream or torch.cuda.current_stream()
        with torch.cuda.stream(on):
            self._live.copy_(self._initial)
        k._words[8] = 0
        k.start(self.arguments, on)

    def stop(self, how: int = 2) -> None:
        """From any thread: 1 ends the run once what is queued is done, 2 at the next tile
        boundary.
        """
        self.kernel._words[8] = how

    def run(self) -> RunTimes:
        """Launches, waits, returns the times. Raises KernelHang with the kernel's own report."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.launch()
        end.record()
        end.synchronize()
        self.check()
        return RunTimes(self.operation_times(), self.tile_times(), start.elapsed_time(end) * 1e3)

    def check(self) -> None:
        if (found := self.kernel._report.take()) is not None:
            raise KernelHang(describe(found))

    def operation_times(self) -> list[tuple[int, int, int]]:
        return [(int(a), int(b), int(c)) for a, b, c in self._times.tolist()]

    def tile_times(self) -> list[TileTime]:
        if not self.trace:
            return []
        counts, raw = self._traced.tolist(), self._trace[:-1].view(-1, self.trace, 4).cpu()
        tiles = []
        for cluster, count in enumerate(counts):
            for began, ended, ps, it in raw[cluster, :count].tolist():
                tiles.append(
                    TileTime(
                        cluster,
                        began,
                        ended,
                        ps & 0xFFFFFFFF,
                        ps >> 32 & 0xFFFFFFFF,
                        it & 0xFFFFFFFF,
                    )
                )
        return tiles
