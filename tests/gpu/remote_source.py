"""An attention server in a process of its own: maps its slot, exports its done word, and keeps
operations in flight until it is killed. Run by `test_resident.py` with the run directory.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from cuda.bindings import driver as cu

from vllm_expertplex.comm.peer import (
    DONE_STRIDE,
    DoneRecord,
    Ready,
    SlotsRecord,
    await_record,
    publish,
)
from vllm_expertplex.cuda.driver import check
from vllm_expertplex.cuda.memory import DeviceMemory, current_device_uuid
from vllm_expertplex.layout import Server, SlotOwner


def main() -> None:
    run_dir, me = Path(sys.argv[1]), SlotOwner(Server("prefill", 0))
    torch.zeros(1, device="cuda")  # makes the context
    done = DeviceMemory.allocate(DONE_STRIDE)
    publish(run_dir, DoneRecord(me, current_device_uuid(), 1, done.export()))
    record = await_record(run_dir, SlotsRecord, Server("moe", 0), 60.0)
    layout = record.layouts[0]
    slot = DeviceMemory.open(record.handles[0], layout.size)
    tokens = layout.max_tokens
    ids = torch.randint(-1, 8, (tokens, layout.topk), dtype=torch.int32)
    write(slot.address + layout.ids_at, ids)
    print("ready", flush=True)
    for seq in range(1, 1 << 20):
        word = Ready(seq, seq % 2, 0, tokens).pack()
        write(slot.address, torch.tensor([word], dtype=torch.int64))
        deadline = time.monotonic() + 20.0
        while int(read(done.address)) != seq:
            assert time.monotonic() < deadline, f"operation {seq} was not done in 20 s"
        if seq == 100:
            print("served", flush=True)


def write(address: int, data: torch.Tensor) -> None:
    size = data.numel() * data.element_size()
    check(cu.cuMemcpyHtoD(address, data.data_ptr(), size), "writing a slot")


def read(address: int) -> torch.Tensor:
    word = torch.zeros(1, dtype=torch.int64)
    check(cu.cuMemcpyDtoH(word.data_ptr(), address, 8), "reading the done word")
    return word


if __name__ == "__main__":
    main()
