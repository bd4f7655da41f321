"""GPU memory as physical pages, which several addresses and several processes can map.

Owns: allocating, mapping, and handing pages to peers. Must not know: what lies in them.

CUDA's virtual memory management: an allocation is exported as a file descriptor, which goes to
peers over a Unix socket; whoever imports it keeps the memory alive.
"""

import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cuda.bindings import driver as cu
from vllm.logger import init_logger

from vllm_expertplex.cuda.driver import check

logger = init_logger(__name__)

_DESCRIPTOR = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_TIMEOUT_S = 30.0


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
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(str(path))
        self._socket.listen(128)
        threading.Thread(target=self._serve, name="asyncep-pages", daemon=True).start()

    def offer(self, name: str, pages: Pages) -> None:
        self._offered[name] = pages

    def _serve(self) -> None:
        check(cu.cuCtxSetCurrent(self._context), "setting the CUDA context")
        while True:
            connection, _ = self._socket.accept()
            with connection:
                connection.settimeout(_TIMEOUT_S)
                try:
                    self._answer(connection)
                except (OSError, RuntimeError, KeyError) as error:
                    logger.warning("AsyncEP: a peer asked for GPU memory and got none: %r", error)

    def _answer(self, connection: socket.socket) -> None:
        pages = self._offered[connection.recv(4096).decode()]
        descriptor = int(
            check(cu.cuMemExportToShareableHandle(pages.handle, _DESCRIPTOR, 0), "exporting pages")
        )
        try:
            socket.send_fds(connection, [str(pages.size).encode()], [descriptor])
        finally:
            os.close(descriptor)


def received(path: Path, name: str) -> Pages:
    """The pages offered under `name` by the process whose socket is at `path`.

    Raises RuntimeError where that process is gone, or its GPU cannot be reached from the current.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(_TIMEOUT_S)
        try:
            connection.connect(str(path))
            connection.send(name.encode())
            size, descriptors, _, _ = socket.recv_fds(connection, 64, 1)
        except OSError as error:
            raise RuntimeError(f"asking {path} for the GPU memory {name}: {error}") from None
    if not descriptors:
        raise RuntimeError(f"{path} did not hand out the GPU memory {name}: see its engine's log")
    try:
        handle = check(
            cu.cuMemImportFromShareableHandle(descriptors[0], _DESCRIPTOR),
            f"opening {int(size)} B of another process' GPU memory",
        )
    finally:
        os.close(descriptors[0])
    return Pages(handle, int(size))
