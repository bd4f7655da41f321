"""GPU memory that peers open through CUDA IPC, copied by the GPU's copy engines.

Owns: those blocks, the streams copies run on, the events that order them with the computation, and
host memory that GPUs read directly. Must not know: layers, experts.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from cuda.bindings import driver as cu

from vllm_expertplex.asyncep.memory import Bytes, HostMemory, Pair
from vllm_expertplex.cuda.driver import check
from vllm_expertplex.cuda.memory import DeviceMemory


@dataclasses.dataclass(frozen=True)
class Span:
    """Bytes by their address, which means the same to the host and to every GPU it has opened."""

    address: int
    size: int

    def __getitem__(self, part: slice) -> "Span":
        start, stop, _ = part.indices(self.size)
        return Span(self.address + start, stop - start)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.size,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }


def _address(block: Any) -> int:
    return int(block.address if isinstance(block, Span) else block.ctypes.data)


class CudaChannel:
    """A stream of copies."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._context = check(cu.cuCtxGetCurrent(), "finding the CUDA context")
        attributes = cu.CUmemcpyAttributes()
        attributes.srcAccessOrder = cu.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        # A hint only: copies within one GPU slow its kernels down with and without it
        # (benchmarks/asyncep_copy.py); those between GPUs do not.
        flags = cu.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
        attributes.flags = int(flags)
        self._attributes = [attributes]

    def copy(self, pairs: Sequence[Pair]) -> int:
        if not pairs:
            return 0
        sizes = [source.size for _, source in pairs]
        # A thread has a context of its own.
        check(cu.cuCtxSetCurrent(self._context), "setting the CUDA context")
        check(
            cu.cuMemcpyBatchAsync(
                [cu.CUdeviceptr(_address(target)) for target, _ in pairs],
                [cu.CUdeviceptr(_address(source)) for _, source in pairs],
                sizes,
                len(pairs),
                self._attributes,
                [0],
                1,
                self._stream.cuda_stream,
            ),
            f"copying {sum(sizes)} B in {len(pairs)} runs",
        )
        return sum(sizes)

    def finish(self) -> None:
        self._stream.synchronize()

    def mark(self) -> torch.cuda.Event:
        return _marked(self._stream)

    def after(self, mark: Any) -> None:
        if mark is not None:
            self._stream.wait_event(mark)


class CudaComputation:
    """The stream on which the calling thread computes."""

    def mark(self) -> torch.cuda.Event:
        return _marked(torch.cuda.current_stream())

    def after(self, mark: Any) -> None:
        torch.cuda.current_stream().wait_event(mark)

    def finish(self) -> None:
        torch.cuda.current_stream().synchronize()


def _marked(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


class _Handle(msgspec.Struct, frozen=True):
    """What a peer needs to open a block."""

    handle: bytes
    size: int


class CudaMemory:
    """Memory of this process's GPU. What it gives out stays until the process ends."""

    def __init__(self) -> None:
        torch.cuda.current_stream().synchronize()  # makes the context

    def create(self, path: Path, size: int) -> Span:
        """Writes the file when whole; what is in the block is for the caller to synchronise."""
        memory = self._allocate(size)
        path.write_bytes(msgspec.msgpack.encode(_Handle(memory.export(), size)))
        return Span(memory.address, size)

    def open(self, path: Path) -> Span:
        found = msgspec.msgpack.decode(path.read_bytes(), type=_Handle)
        return Span(DeviceMemory.open(found.handle, found.size).address, found.size)

    def buffer(self, size: int) -> Span:
        return Span(self._allocate(size).address, size)

    def _allocate(self, size: int) -> DeviceMemory:
        torch.cuda.empty_cache()  # what torch holds back, parameters moved just now for example
        return DeviceMemory.allocate(max(size, 1))

    def tensor(self, block: Span) -> torch.Tensor:
        return torch.as_tensor(block, device="cuda")

    def channel(self) -> CudaChannel:
        return CudaChannel()

    def computation(self) -> CudaComputation:
        return CudaComputation()


class PinnedMemory(HostMemory):
    """Shared host memory that the copy engines read themselves."""

    def create(self, path: Path, size: int) -> Bytes:
        return _registered(super().create(path, size), 0)

    def open(self, path: Path) -> Bytes:
        return _registered(super().open(path), cu.CU_MEMHOSTREGISTER_READ_ONLY)


def _registered(block: Bytes, flags: int) -> Bytes:
    check(
        cu.cuMemHostRegister(block.ctypes.data, block.size, flags),
        f"pinning {block.size / 2**20:.0f} MiB of host memory",
    )
    return block
