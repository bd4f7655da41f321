"""The kernel resident on a GPU, serving slots that attention servers write into.

Owns: launch, stop, what the kernel tells the host meanwhile. Must not know: vLLM, who maps slots.

While it runs, whatever frees GPU memory or loads a module waits for its end: allocate, load and
warm up everything first, and free nothing. Copies and stream operations go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from . import structs
from .buffers import LayerWeights, OperationBuffers, to_device
from .kernel import PersistentKernel
from .report import NOT_AN_OPERATION, KernelHang, ReportWord, describe

DRAIN, ABORT = 1, 2
# Decode's clusters wait so long for its next stage to open rather than take a prefill tile, which
# the stage would then wait for: stages follow one another within 5 us, a prefill tile takes 10-30.
HOLD_NS = 20_000
# Decode operations of one layer that are ready within this time of one another run as one; nobody
# waits for a server that has sent nothing for longer than STALE_NS.
WINDOW_NS, STALE_NS = 20_000, 1_000_000
_TALLY_WORDS = 16  # per cluster, and of the controller; see `csrc/apk/layout.cuh`
_STOP_AT = 8  # words after the heartbeat, in a cache line of its own


class ServedSlot(NamedTuple):
    """A slot: addresses of its ready word here and its done word at the attention server.

    `source`: its queue in the scheduler, below 32; at most two slots share one. `seen`: sequence
    number of the latest operation that was served already.
    """

    source: int
    ready: int
    done: int
    buffers: OperationBuffers
    seen: int = 0


class Tallies(NamedTuple):
    """What the clusters have done since launch, in all; times in ns. Updated every millisecond."""

    tiles_decode: int
    tiles_prefill: int
    preemptions: int
    preempt_ns: int
    preempt_max_ns: int
    holds: int
    idle_ns: int
    busy_decode_ns: int
    busy_prefill_ns: int
    weight_bytes: int
    decode_clusters: int  # that prefer decode since the latest check epoch
    operations_decode: int
    operations_prefill: int
    tokens_decode: int
    tokens_prefill: int
    coalesced: int  # decode operations that ran as part of another


class ResidentRun:
    """Everything one launch needs. `budget`: decode's share (ExpertPlex section 6), all by default.

    `fifo`: operations are served one after the other in order of arrival, whatever their phase.
    `coalescing`: decode operations of one layer run as one; never with `fifo`.

    Limits in ms end the launch with a report: of a tile, of an operation (0: none), and for tests
    of the whole launch.
    """

    def __init__(
        self,
        kernel: PersistentKernel,
        slots: Sequence[ServedSlot],
        layers: Sequence[LayerWeights],
        budget: structs.Budget | None = None,
        *,
        fifo: bool = False,
        coalescing: bool = True,
        hold_ns: int = HOLD_NS,
        window_ns: int = WINDOW_NS,
        quantum: int = 1 << 20,
        tile_ms: int = 5000,
        operation_ms: int = 0,
        max_ms: int = 0,
    ) -> None:
        if not 1 <= len(slots) <= structs.MAX_SLOTS:
            raise ValueError(f"{len(slots)} slots; the kernel serves 1 to {structs.MAX_SLOTS}")
        device = kernel.device
        self._kernel, self._layers_kept, self._slots_kept = kernel, list(layers), list(slots)
        self.budget = budget or kernel.budget()
        self._config = structs.Config(kernel.clusters, quantum, hold_ns, self.budget)
        self._state = torch.zeros(kernel.state_bytes + 8, dtype=torch.uint8, device=device)
        self._templates = to_device([s.buffers.struct for s in slots], device)
        self._layers = to_device([w.struct for w in layers], device)
        served = [
            structs.ServedSlot(s.ready, s.done, s.source, s.buffers.max_tokens, s.seen)
            for s in slots
        ]
        self._slots = to_device(served, device)
        self._members = to_device([structs.Members() for _ in slots], device)
        self._words = torch.zeros(2 * _STOP_AT, dtype=torch.int64, pin_memory=True)
        self._tallies = torch.zeros(
            kernel.clusters + 1, _TALLY_WORDS, dtype=torch.int64, pin_memory=True
        )
        self._report = ReportWord()
        self._stream, self._ended = torch.cuda.Stream(), torch.cuda.Event()
        self.arguments = structs.Launch(
            state=self._state.data_ptr(),
            templates=self._templates.data_ptr(),
            layers=self._layers.data_ptr(),
            slots=self._slots.data_ptr(),
            members=self._members.data_ptr(),
            tallies=self._tallies.data_ptr(),
            request=self._state.data_ptr() + kernel.state_bytes,
            report=self._report.address,
            heartbeat=self._words.data_ptr(),
            stop=self._words[_STOP_AT:].data_ptr(),
            max_ns=max_ms * 1_000_000,
            tile_ns=tile_ms * 1_000_000,
            operation_ns=operation_ms * 1_000_000,
            n_slots=len(slots),
            n_layers=len(layers),
            fifo=fifo,
            coalescing=coalescing,
            window_ns=window_ns,
            stale_ns=STALE_NS,
        )

    def launch(self) -> None:
        """Starts the kernel; returns once it is queued. It goes on where it was stopped before."""
        self._words.zero_()
        self._tallies.zero_()
        with torch.cuda.stream(self._stream):
            self._state.zero_()
            self._kernel.initialise(self._state, self._config)
            # All that others still do on this GPU comes first: it may need the SMs.
            torch.cuda.synchronize()
            self._kernel.start(self.arguments, self._stream)
            self._ended.record()

    def stop(self, how: int = DRAIN) -> None:
        """From any thread: DRAIN serves what the kernel has seen, ABORT ends at tile boundaries."""
        self._words[_STOP_AT] = how

    @property
    def running(self) -> bool:
        """Raises RuntimeError, from CUDA, where the kernel has failed."""
        return not self._ended.query()

    def wait(self) -> None:
        """Until it has ended. Raises KernelHang if it ended early."""
        self._ended.synchronize()
        if warning := self.check():
            raise KernelHang(warning)

    def check(self) -> str | None:
        """What the kernel complains of but survives. Raises KernelHang if it ended early."""
        found = self._report.take()
        if found is None:
            return None
        if found.reason != NOT_AN_OPERATION:
            raise KernelHang(describe(found))
        return describe(found)

    @property
    def heartbeat_ns(self) -> int:
        """The GPU's clock when the kernel last looked at the host's words: every few us."""
        return int(self._words[0])

    def tallies(self) -> Tallies:
        clusters, controller = self._tallies[:-1].clone(), self._tallies[-1].tolist()
        sums, longest = clusters.sum(0).tolist(), Tallies._fields.index("preempt_max_ns")
        sums[longest] = int(clusters[:, longest].max())
        p_i = Tallies._fields.index("decode_clusters")
        sums[p_i] = int((clusters[:, p_i] & 0xFF == structs.DECODE).sum())
        return Tallies(*sums[: p_i + 1], *controller[: len(Tallies._fields) - p_i - 1])
