"""Stand-ins for attention servers: slots in this process, driven by the host or by a kernel that
keeps operations in flight and checks every result bit for bit (`client.cu`).
"""

from __future__ import annotations

import contextlib
import ctypes as c
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import operands
import torch

from vllm_expertplex.comm.peer import Ready, SlotLayout
from vllm_expertplex.cuda.driver import Module, launch
from vllm_expertplex.moe_server.apk import structs
from vllm_expertplex.moe_server.apk.buffers import LayerWeights, OperationBuffers, OperationTemplate
from vllm_expertplex.moe_server.apk.jit import KernelShape, Toolchain
from vllm_expertplex.moe_server.apk.kernel import PersistentKernel
from vllm_expertplex.moe_server.apk.resident import ABORT, DRAIN, ResidentRun, ServedSlot
from vllm_expertplex.moe_server.slots import operands as slot_operands

PHASES = (structs.DECODE, structs.PREFILL)


class _Section(c.Structure):
    _fields_ = (("offset", c.c_uint64), ("row_bytes", c.c_uint64))


class _Client(c.Structure):
    _fields_ = (
        *((n, c.c_uint64) for n in ("slot", "done", "inputs", "expected", "took_ns", "kind")),
        *((n, c.c_uint64) for n in ("inputs_bytes", "gap_ns", "timeout_ns")),
        ("section", _Section * 4),
        ("result", _Section),
        ("max_tokens", c.c_uint32 * 2),
        *(
            (n, c.c_uint32)
            for n in ("variants", "layers", "capacity", "operations", "seed", "seq", "fixed")
        ),
    )


def slot_layout(shape: KernelShape, tokens: int) -> SlotLayout:
    return SlotLayout(tokens, shape.hidden, shape.top_k, not shape.bf16)


def sections(layout: SlotLayout) -> list[tuple[int, int]]:
    """(offset, bytes per token) of tokens, scales, ids, weights and result."""
    scales = layout.hidden // 128 * 4 if layout.fp8 else 0
    return [
        (layout.tokens_at, layout.hidden * (1 if layout.fp8 else 2)),
        (layout.scales_at, scales),
        (layout.ids_at, layout.topk * 4),
        (layout.weights_at, layout.topk * 4),
        (layout.result_at, layout.hidden * 2),
    ]


class Source:
    """A slot and its done word."""

    def __init__(self, shape: KernelShape, tokens: int, index: int) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.index, self.seq, self.layout = index, 0, slot_layout(shape, tokens)
        self.memory = torch.zeros(self.layout.size, dtype=torch.uint8, device=device)
        self.done = torch.zeros(1, dtype=torch.int64, device=device)
        address = self.memory.data_ptr()
        buffers = OperationBuffers(shape, tokens, slot_operands(address, self.layout), device)
        self.served = ServedSlot(index, address, self.done.data_ptr(), buffers)

    def put(self, inputs: torch.Tensor) -> None:
        """Operands as `pack` makes them; the results are poisoned."""
        first, end = self.layout.tokens_at, self.layout.result_at
        self.memory[first:end].copy_(inputs[first:end])
        self.memory[end:].fill_(0xFF)

    def send(self, phase: int, layer: int, tokens: int) -> None:
        self.seq += 1
        word = Ready(self.seq, phase, layer, tokens).pack()
        torch.cuda.current_stream().synchronize()
        signed = word - (1 << 64) if word >> 63 else word
        self.memory[:8].view(torch.int64).copy_(torch.tensor([signed]))

    def wait(self, timeout_s: float = 2.0) -> None:
        deadline = time.monotonic() + timeout_s
        while int(self.done.cpu()) != self.seq:
            assert time.monotonic() < deadline, f"operation {self.seq} of source {self.index}"

    def result(self, tokens: int) -> torch.Tensor:
        at, row = sections(self.layout)[4]
        raw = self.memory[at : at + tokens * row].cpu()
        return raw.view(torch.bfloat16).view(tokens, -1)


def pack(op: OperationTemplate, layout: SlotLayout) -> torch.Tensor:
    """The template's operands as they lie in a slot, up to the result."""
    out = torch.zeros(layout.result_at, dtype=torch.uint8, device=op.result.device)
    fields = (op.tokens, op.token_scales, op.expert_ids, op.expert_weights)
    for (at, row), t in zip(sections(layout)[:4], fields, strict=True):
        raw = t.contiguous().view(torch.uint8).flatten()[: layout.max_tokens * row]
        out[at : at + len(raw)] = raw
    return out


class Expected(NamedTuple):
    """Operands of several operations, and what finite runs make of them."""

    inputs: torch.Tensor  # [variants, bytes]
    results: torch.Tensor  # [variants, layers, phases, tokens, H]


def expect(
    kernel: PersistentKernel, layers: Sequence[LayerWeights], tokens: int, variants: int
) -> Expected:
    """Random operations of `tokens` tokens, each run alone in both phases and all layers."""
    shape, inputs, results = kernel.shape, [], []
    layout = slot_layout(shape, tokens)
    for _ in range(variants):
        ids = torch.rand(tokens, 2 * shape.experts, device="cuda").argsort(1)[:, : shape.top_k]
        op = OperationTemplate(shape, tokens, True, kernel.device)
        operands.fill_tokens(op, tokens, torch.where(ids < shape.experts, ids, -1))
        inputs.append(pack(op, layout))
        for layer in range(len(layers)):
            for phase in PHASES:
                op.wide = phase == structs.PREFILL
                operands.poison(op)
                kernel.prepare([op], layers, [(0, phase, op.operation(0, 0, layer))]).run()
                results.append(op.result.clone())
    stacked = torch.stack(results).view(variants, len(layers), len(PHASES), tokens, -1)
    return Expected(torch.stack(inputs), stacked)


class Clients:
    """The client kernel, loaded before the resident one runs."""

    def __init__(self) -> None:
        source = Path(__file__).with_name("client.cu")
        with tempfile.TemporaryDirectory() as scratch:
            cubin = Path(scratch) / "client.cubin"
            command = [Toolchain.find().nvcc, "-std=c++20", "-cubin", "-arch=sm_90"]
            subprocess.run([*command, str(source), "-o", str(cubin)], check=True)
            self._kernel = Module(cubin).function("clients")
        self.stream = torch.cuda.Stream()

    def prepare(
        self,
        sources: Sequence[Source],
        most: Sequence[tuple[int, int]],
        expected: Expected,
        operations: Sequence[int],
        *,
        check: bool = True,
        fixed: bool = False,
        gap_ns: int = 0,
        seed: int = 1,
    ) -> Clients:
        """One client per source; `most`: tokens of an operation, (decode, prefill), 0 for none."""
        self._sources = list(sources)
        self._keep = [expected]
        total = sum(operations)
        self.took = torch.zeros(total, dtype=torch.int64, device="cuda")
        self.kind = torch.zeros(total, dtype=torch.int32, device="cuda")
        items, first = [], 0
        for s, (decode, prefill), n in zip(sources, most, operations, strict=True):
            *given, result = (_Section(*x) for x in sections(s.layout))
            items.append(
                _Client(
                    s.memory.data_ptr(),
                    s.done.data_ptr(),
                    expected.inputs.data_ptr(),
                    expected.results.data_ptr() if check else 0,
                    self.took.data_ptr() + 8 * first,
                    self.kind.data_ptr() + 4 * first,
                    expected.inputs.shape[1],
                    gap_ns,
                    2_000_000_000,
                    (_Section * 4)(*given),
                    result,
                    (c.c_uint32 * 2)(decode, prefill),
                    *expected.results.shape[:2],
                    expected.results.shape[3],
                    n,
                    seed * 7919 + s.index + 1,
                    s.seq,
                    fixed,
                )
            )
            first += n
        self._items = torch.frombuffer(bytearray(b"".join(map(bytes, items))), dtype=torch.uint8)
        self._items = self._items.cuda()
        self._outcomes = torch.zeros(len(items), 4, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        return self

    def warm_up(self) -> None:
        """Loads the kernel: a first launch beside the resident one would wait for it."""
        empty = torch.zeros(c.sizeof(_Client), dtype=torch.uint8, device="cuda")
        out = torch.zeros(4, dtype=torch.int32, device="cuda")
        args = c.c_uint64(empty.data_ptr()), c.c_uint64(out.data_ptr())
        launch(self._kernel, 1, 256, 0, self.stream, *args)
        torch.cuda.synchronize()

    def run(self) -> list[tuple[int, int, int]]:
        """Per source: operations done, threads that saw a wrong word, 1 if one timed out."""
        args = c.c_uint64(self._items.data_ptr()), c.c_uint64(self._outcomes.data_ptr())
        launch(self._kernel, len(self._sources), 256, 0, self.stream, *args)
        self.stream.synchronize()
        outcomes = self._outcomes.cpu().tolist()
        for s, (_, _, _, seq) in zip(self._sources, outcomes, strict=True):
            s.seq = seq & 0xFFFFFFFF
        return [(done, wrong, late) for done, wrong, late, _ in outcomes]


@contextlib.contextmanager
def resident(run: ResidentRun) -> Iterator[ResidentRun]:
    """Runs it meanwhile; afterwards it has drained, or the test has failed."""
    run.launch()
    try:
        yield run
    except BaseException:
        run.stop(ABORT)
        with contextlib.suppress(RuntimeError):
            run.wait()
        raise
    run.stop(DRAIN)
    run.wait()
