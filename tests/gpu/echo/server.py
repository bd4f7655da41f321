"""MoE servers that echo, all in one process on one GPU: `python server.py SPEC.json`.

SPEC.json holds a `Spec`. The process publishes its slots, serves until its standard input closes
or says "stop" (then it keeps its memory until the input closes), and prints the times it took.
"""

from __future__ import annotations

import ctypes as c
import json
import sys
from pathlib import Path

import msgspec
import torch

from vllm_expertplex.comm.peer import (
    DONE_STRIDE,
    DoneRecord,
    SlotLayout,
    SlotsRecord,
    await_record,
    publish,
)
from vllm_expertplex.comm.peer_kernels import Offsets
from vllm_expertplex.cuda.driver import Module, launch
from vllm_expertplex.cuda.memory import DeviceMemory, current_device_uuid
from vllm_expertplex.cuda.nvcc import csrc, cubin
from vllm_expertplex.layout import Layout, SlotOwner

MAX_SOURCES, TIMES = 16, 1 << 16


class Spec(msgspec.Struct):
    run_dir: str
    layout: str
    slots: list[SlotLayout]  # of the attention servers, in layout order
    ctas: int = 64  # per source
    max_s: float = 120


class Source(c.Structure):
    _fields_ = (("slot", c.c_uint64), ("done", c.c_uint64), ("at", Offsets))


class EchoArguments(c.Structure):
    _fields_ = (
        ("sources", Source * MAX_SOURCES),
        ("passed", c.c_uint64),
        ("finished", c.c_uint64),
        ("began", c.c_uint64),
        ("times", c.c_uint64),
        ("stop", c.c_uint64),
        ("max_ns", c.c_uint64),
        ("hidden", c.c_uint32),
        ("topk", c.c_uint32),
        ("fp8", c.c_uint32),
        ("reserved", c.c_uint32),
    )


class Echo:
    """One echoing MoE server."""

    def __init__(self, spec: Spec, layout: Layout, rank: int, module: Module) -> None:
        n = len(spec.slots)
        self._spec, self._rank, self._layout = spec, rank, layout
        self._slots = [DeviceMemory.allocate(slot.size) for slot in spec.slots]
        self._passed = torch.zeros(n, spec.ctas, 16, dtype=torch.int64, device="cuda")
        self._finished = torch.zeros(n, dtype=torch.int32, device="cuda")
        self._began = torch.zeros(n, dtype=torch.int64, device="cuda")
        self._times = torch.zeros(n, TIMES, dtype=torch.int32, device="cuda")
        self._kernel = module.function("expertplex_echo")
        self._stream = torch.cuda.Stream()
        publish(
            Path(spec.run_dir),
            SlotsRecord(
                layout.moe_servers[rank],
                current_device_uuid(),
                [SlotOwner(server) for server in layout.attention_servers],
                spec.slots,
                [slot.export() for slot in self._slots],
            ),
        )

    def connect(self, stop: torch.Tensor) -> None:
        arguments = EchoArguments(
            passed=self._passed.data_ptr(),
            finished=self._finished.data_ptr(),
            began=self._began.data_ptr(),
            times=self._times.data_ptr(),
            stop=stop.data_ptr(),
            max_ns=int(self._spec.max_s * 1e9),
            hidden=self._spec.slots[0].hidden,
            topk=self._spec.slots[0].topk,
            fp8=self._spec.slots[0].fp8,
        )
        self._done = []
        for i, (server, slot) in enumerate(
            zip(self._layout.attention_servers, self._spec.slots, strict=True)
        ):
            record = await_record(Path(self._spec.run_dir), DoneRecord, SlotOwner(server), 60)
            done = DeviceMemory.open(record.handle, record.words * DONE_STRIDE)
            self._done.append(done)
            at = Offsets(
                slot.tokens_at, slot.scales_at, slot.ids_at, slot.weights_at, slot.result_at
            )
            arguments.sources[i] = Source(
                self._slots[i].address, done.address + self._rank * DONE_STRIDE, at
            )
        self._arguments = arguments

    def start(self) -> None:
        grid = (self._spec.ctas, len(self._spec.slots))
        launch(self._kernel, grid, 512, 0, self._stream, self._arguments)

    def times(self) -> list[list[int]]:
        """ns that each source's operations took, in order."""
        return [[t for t in row[1:] if t] for row in self._times.tolist()]


def main() -> None:
    spec = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Spec)
    layout = Layout.parse(spec.layout)
    source = Path(__file__).with_name("echo.cu")
    module = Module(cubin(source, list((csrc() / "attention").glob("*.cuh"))))
    if module.words("expertplex_echo_sizes") != [c.sizeof(EchoArguments)]:
        raise RuntimeError("EchoArguments differ between echo.cu and server.py")
    stop = torch.zeros(16, dtype=torch.int32, pin_memory=True)
    servers = [Echo(spec, layout, rank, module) for rank in range(layout.moe)]
    for server in servers:
        server.connect(stop)
    torch.cuda.synchronize()  # never again: it would wait for the kernels
    for server in servers:
        server.start()
    print("started", flush=True)
    sys.stdin.readline()
    stop[0] = 1
    torch.cuda.synchronize()
    print(json.dumps([server.times() for server in servers]), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
