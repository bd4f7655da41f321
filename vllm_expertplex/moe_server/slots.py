"""The slots of a MoE server in its GPU's memory: one per attention server, rank and microbatch.

Owns: allocating them, the buffers that operations need beside them, meeting the attention servers
in the run directory. Must not know: the kernel's life, vLLM.

Nothing here is released before the process ends: freeing waits for the resident kernel, and
attention servers may still look at their results.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from vllm_expertplex.comm.peer import (
    DONE_STRIDE,
    DoneRecord,
    SlotLayout,
    SlotsRecord,
    await_record,
    publish,
)
from vllm_expertplex.cuda.memory import DeviceMemory, current_device_uuid
from vllm_expertplex.layout import Server, SlotOwner, senders
from vllm_expertplex.moe_server.apk.buffers import Operands, OperationBuffers
from vllm_expertplex.moe_server.apk.jit import KernelShape
from vllm_expertplex.moe_server.apk.resident import ServedSlot


def operands(address: int, layout: SlotLayout) -> Operands:
    """Where the kernel finds its operands in the slot at `address`."""
    return Operands(
        tokens=address + layout.tokens_at,
        token_scales=address + layout.scales_at,
        expert_ids=address + layout.ids_at,
        expert_weights=address + layout.weights_at,
        result=address + layout.result_at,
    )


class Slots:
    """Allocates a slot per owner and publishes them for the attention servers to open."""

    def __init__(
        self,
        run_dir: Path,
        me: Server,
        owners: Sequence[SlotOwner],
        layouts: Sequence[SlotLayout],
        shape: KernelShape,
        device: torch.device,
    ) -> None:
        self._run_dir, self._me, self._owners = run_dir, me, owners
        self._memory = [DeviceMemory.allocate(layout.size) for layout in layouts]
        self._buffers = [
            OperationBuffers(shape, layout.max_tokens, operands(memory.address, layout), device)
            for memory, layout in zip(self._memory, layouts, strict=True)
        ]
        publish(
            run_dir,
            SlotsRecord(
                me,
                current_device_uuid(),
                list(owners),
                list(layouts),
                [m.export() for m in self._memory],
            ),
        )

    def connect(self, timeout_s: float) -> list[ServedSlot]:
        """Opens the done word of every slot, in the order of the owners.

        Raises TimeoutError naming one that has not published it.
        """
        order = senders(self._owners)
        served = []
        for index, owner in enumerate(self._owners):
            record = await_record(self._run_dir, DoneRecord, owner, timeout_s)
            if self._me.rank >= record.words:
                raise RuntimeError(
                    f"{owner.name} has done words for {record.words} MoE servers, but this is "
                    f"{self._me.name}: all servers must run the same layout"
                )
            done = DeviceMemory.open(record.handle, record.words * DONE_STRIDE)
            served.append(
                ServedSlot(
                    order.index(owner.source),
                    self._memory[index].address,
                    done.address + self._me.rank * DONE_STRIDE,
                    self._buffers[index],
                )
            )
        return served
