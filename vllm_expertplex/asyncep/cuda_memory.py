"""GPU memory that peers map too, copied by the GPU's copy engines.

Owns: those blocks, the streams copies run on, the events that order them with the computation, and
host memory that GPUs read directly. Must not know: layers, experts.
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from cuda.bindings import driver as cu

from vllm_expertplex.asyncep.memory import Bytes, HostMemory, Pair
from vllm_expertplex.asyncep.pages import (
    Pages,
    PageServer,
    allocate,
    mapped,
    open_pages,
    page_size,
)
from vllm_expertplex.cuda.driver import check
from vllm_expertplex.files import write_whole


@dataclasses.dataclass(frozen=True)
class Span:
    """Bytes by their address, which means the same to the host and to every GPU it has opened.

    `pages` is what a whole block is made of; a part of a block has none.
    """

    address: int
    size: int
    pages: tuple[Pages, ...] = ()

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


class _Offer(msgspec.Struct, frozen=True):
    """Where a peer gets a block's pages: the name of a socket beside this file."""

    socket: str
    size: int


class CudaMemory:
    """Memory of this process's GPU. What it gives out stays until the process ends."""

    def __init__(self) -> None:
        torch.cuda.current_stream().synchronize()  # makes the context
        self.page = page_size()
        self._server: PageServer | None = None

    def create(self, path: Path, size: int) -> Span:
        """Writes the file when whole; what is in the block is for the caller to synchronise."""
        if self._server is None:
            self._server = PageServer(path.with_name(f"pages-{os.getpid()}.sock"))
        block = self.buffer(size)
        self._server.offer(path.name, *block.pages)
        offer = _Offer(self._server.path.name, size)
        write_whole(path, msgspec.msgpack.encode(offer))
        return block

    def open(self, path: Path) -> Span:
        offer = msgspec.msgpack.decode(path.read_bytes(), type=_Offer)
        pages = open_pages(path.with_name(offer.socket), path.name)
        return Span(mapped([pages]), offer.size, (pages,))

    def buffer(self, size: int) -> Span:
        torch.cuda.empty_cache()  # what torch holds back, parameters moved just now for example
        pages = allocate(size)
        return Span(mapped([pages]), size, (pages,))

    def join(self, blocks: Sequence[Span]) -> Span:
        pages = [p for block in blocks for p in block.pages]
        return Span(mapped(pages), sum(block.size for block in blocks), tuple(pages))

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
