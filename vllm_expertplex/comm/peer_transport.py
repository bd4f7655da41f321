"""An attention server's end of the GPU data path: dispatch a layer's tokens, combine what returns.

Owns: its done words, the MoE servers' slots it has opened, what is in flight.
Must not know: models, phases' policies, how kernels move bytes.

Nothing here waits for the GPU: every call queues kernels on the current stream, so a decode step
with all its MoE layers is captured in a CUDA graph and replayed.
"""

from __future__ import annotations

import ctypes
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
from vllm_expertplex.comm.peer_kernels import (
    MAX_EXPERTS,
    MAX_SERVERS,
    CombineArguments,
    DispatchArguments,
    Lost,
    Offsets,
    PeerKernels,
    Peers,
    State,
)
from vllm_expertplex.comm.shm import MoeServerLost
from vllm_expertplex.cuda.memory import DeviceMemory, current_device_uuid
from vllm_expertplex.layout import PHASE_DECODE, ExpertMap, Layout, SlotOwner


class PeerTransport:
    """One operation at a time, in the slots of `owner`. `layer_names` only serve messages.

    The constructor allocates and publishes the slots' done words; `connect` then opens the slots
    that MoE servers have published. Both need a current CUDA device.
    """

    def __init__(
        self,
        run_dir: Path,
        owner: SlotOwner,
        layout: Layout,
        slot: SlotLayout,
        experts: ExpertMap,
        timeout_s: float,
    ) -> None:
        if layout.moe > MAX_SERVERS:
            raise ValueError(f"{layout.moe} MoE servers; the GPU kernels take 1 to {MAX_SERVERS}")
        if len(experts.server) > MAX_EXPERTS:
            raise ValueError(
                f"{len(experts.server)} experts; the GPU kernels take 1 to {MAX_EXPERTS}"
            )
        self._run_dir, self._owner, self._layout, self._slot = run_dir, owner, layout, slot
        self._name = owner.name
        self._timeout_s = timeout_s
        self._kernels = PeerKernels(slot.fp8)
        places = [z << 16 | slot for z, slot in zip(experts.server, experts.slot, strict=True)]
        self._places = torch.tensor(places, dtype=torch.int32).cuda()
        self._masks = torch.zeros(slot.max_tokens, dtype=torch.int32, device="cuda")
        self._state = torch.zeros(ctypes.sizeof(State), dtype=torch.uint8, device="cuda")
        self._lost_bytes = torch.zeros(ctypes.sizeof(Lost), dtype=torch.uint8, pin_memory=True)
        self._lost = Lost.from_address(self._lost_bytes.data_ptr())
        self._done = DeviceMemory.allocate(layout.moe * DONE_STRIDE)
        self._slots: list[DeviceMemory] = []
        self._peers: Peers | None = None
        self.layer_names: list[str] = []
        publish(run_dir, DoneRecord(owner, current_device_uuid(), layout.moe, self._done.export()))

    def connect(self, timeout_s: float) -> None:
        """Open this server's slot on every MoE server. Raises TimeoutError with the server's name,
        and ValueError where a server laid its slot out differently.
        """
        for moe in self._layout.moe_servers:
            record = await_record(self._run_dir, SlotsRecord, moe, timeout_s)
            index = record.owners.index(self._owner)
            found = record.layouts[index]
            if found != self._slot:
                raise ValueError(
                    f"{moe.name} has a slot of {found} for {self._name}, which expects "
                    f"{self._slot}; all servers must run the same model and options"
                )
            self._slots.append(DeviceMemory.open(record.handles[index], self._slot.size))
        at = self._slot
        self._peers = Peers(
            slots=(ctypes.c_uint64 * MAX_SERVERS)(*(slot.address for slot in self._slots)),
            done=self._done.address,
            state=self._state.data_ptr(),
            masks=self._masks.data_ptr(),
            lost=self._lost_bytes.data_ptr(),
            at=Offsets(at.tokens_at, at.scales_at, at.ids_at, at.weights_at, at.result_at),
            servers=len(self._slots),
            hidden=at.hidden,
            topk=at.topk,
            experts=len(self._places),
        )

    def dispatch(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        layer: int,
        phase: int,
    ) -> None:
        """Push x [n, hidden] bf16 with topk_weights [n, topk] fp32 and topk_ids [n, topk] int32.

        Raises ValueError with both shapes where they do not fit the slots.
        """
        n, slot = x.shape[0], self._slot
        found = (x.dtype, tuple(x.shape[1:]), tuple(topk_ids.shape), tuple(topk_weights.shape))
        expected = (torch.bfloat16, (slot.hidden,), (n, slot.topk), (n, slot.topk))
        if found != expected or n > slot.max_tokens:
            raise ValueError(
                f"{self._name}: {n} tokens with x, topk_ids, topk_weights {found}; the slots "
                f"hold {slot.max_tokens} tokens of {expected}; the layer is not the one the "
                "configuration describes"
            )
        assert self._peers is not None, "connect first"
        # vLLM's routers return these types and layouts already, and then this costs nothing.
        x = x.contiguous()
        ids = topk_ids.to(torch.int32).contiguous()
        weights = topk_weights.to(torch.float32).contiguous()
        self._word = phase << 31 | layer << 20 | n
        self._small = phase == PHASE_DECODE
        arguments = DispatchArguments(
            self._peers,
            x.data_ptr(),
            ids.data_ptr(),
            weights.data_ptr(),
            self._places.data_ptr(),
            n,
            self._word,
        )
        self._kernels.dispatch(arguments, self._small)

    def combine(self, tokens: int, dtype: torch.dtype) -> torch.Tensor:
        """Queue the wait for every MoE server, then the sum [tokens, hidden] as `dtype` (bf16).

        Nothing is known about the sum until the stream has got there and `check` has not raised.
        """
        if dtype is not torch.bfloat16:
            raise ValueError(f"{self._name}: a {dtype} model; the GPU kernels serve bfloat16")
        assert self._peers is not None, "connect first"
        out = torch.empty(tokens, self._slot.hidden, dtype=dtype, device="cuda")
        timeout_ns = int(self._timeout_s * 1e9)
        arguments = CombineArguments(self._peers, out.data_ptr(), timeout_ns, tokens, self._word)
        self._kernels.combine(arguments, self._small)
        return out

    def check(self) -> None:
        """Raise MoeServerLost, with the servers and the layer, once a deadline was missed."""
        if not self._lost.servers:
            return
        lost = ", ".join(
            moe.name for moe in self._layout.moe_servers if self._lost.servers >> moe.rank & 1
        )
        layer = self._lost.layer
        name = self.layer_names[layer] if self.layer_names else str(layer)
        raise MoeServerLost(
            f"{self._name}: {lost} did not finish layer {name} for {self._lost.tokens} tokens "
            f"(operation {self._lost.sequence}): it is gone, or slower than moe_timeout_s = "
            f"{self._timeout_s:g} s"
        )

    def close(self) -> None:
        """Give the memory back; before the MoE servers end."""
        for slot in self._slots:
            slot.close()
        self._done.close()
        self._slots, self._peers = [], None
