"""GPU memory as physical pages, which several addresses and several processes can map.

Owns: allocating, mapping, and handing pages to peers. Must not know: what lies in them.

CUDA's virtual memory management: an allocation is exported as a file descriptor, which goes to
peers (`descriptors.py`); whoever imports it keeps the memory alive.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cuda.bindings import driver as cu

from vllm_expertplex.asyncep.descriptors import DescriptorServer, received
from vllm_expertplex.cuda.driver import check

_DESCRIPTOR = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


class Pages(NamedTuple):
    """A physical allocation of `size` bytes, a multiple of `page_size()`."""

    handle: Any
    size: int


def _properties() -> cu.CUmemAllocationProp:
    found = cu.CUmemAllocationProp()
    found.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    found.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    found.location.id = int(check(cu.cuCtxGetDevice(), "finding the current GPU"))
    found.requestedHandleTypes = _DESCRIPTOR
    return found


def page_size() -> int:
    """Bytes of the smallest allocation on the current GPU: 2 MiB."""
    least = cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(check(cu.cuMemGetAllocationGranularity(_properties(), least), "page size"))


def allocate(size: int) -> Pages:
    """At least `size` bytes of the current GPU. Raises RuntimeError where it has too little."""
    page = page_size()
    whole = max(1, -(-size // page)) * page
    handle = check(cu.cuMemCreate(whole, _properties(), 0), f"allocating {whole} B of GPU memory")
    return Pages(handle, whole)


def mapped(pages: Sequence[Pages]) -> int:
    """A new address of the current GPU at which these pages, also a peer's, lie one after the
    other.
    """
    size = sum(p.size for p in pages)
    what = f"mapping {size} B of GPU memory"
    address = int(check(cu.cuMemAddressReserve(size, 0, 0, 0), what))
    offset = 0
    for p in pages:
        check(cu.cuMemMap(address + offset, p.size, 0, p.handle, 0), what)
        offset += p.size
    here = _properties()  # its location is a part of it
    access = cu.CUmemAccessDesc()
    access.location = here.location
    access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    check(cu.cuMemSetAccess(address, size, [access], 1), what)
    return address


class PageServer:
    """Hands pages to whoever asks by name at the socket `path`, while the process lives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offered: dict[str, Pages] = {}
        self._context = check(cu.cuCtxGetCurrent(), "finding the CUDA context")
        self._server = DescriptorServer(path, self._export)

    def offer(self, name: str, pages: Pages) -> None:
        self._offered[name] = pages

    def _export(self, name: str) -> tuple[str, int]:
        # A thread has a context of its own.
        check(cu.cuCtxSetCurrent(self._context), "setting the CUDA context")
        pages = self._offered[name]
        descriptor = check(
            cu.cuMemExportToShareableHandle(pages.handle, _DESCRIPTOR, 0), "exporting pages"
        )
        return str(pages.size), int(descriptor)


def open_pages(path: Path, name: str) -> Pages:
    """The pages offered under `name` by the process whose socket is at `path`.

    Raises RuntimeError where that process is gone, or its GPU cannot be reached from the current.
    """
    size, descriptor = received(path, name)
    try:
        handle = check(
            cu.cuMemImportFromShareableHandle(descriptor, _DESCRIPTOR),
            f"opening {size} B of another process' GPU memory",
        )
    finally:
        os.close(descriptor)
    return Pages(handle, int(size))
