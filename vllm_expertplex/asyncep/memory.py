"""Where expert weights lie, and how bytes get from one place to another.

Owns: what both kinds of memory can do, and the kind that CPUs use. Must not know: layers, experts.

A *block* is a run of bytes. A *channel* copies blocks in the order it is asked to, beside what is
computed; *marks* order it with the computation. Host memory needs none of that: a thread copies,
and every copy is over when the call returns. GPU memory is in `cuda_memory.py`.
"""

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

Bytes = npt.NDArray[np.uint8]


class Block(Protocol):
    """A run of `size` bytes; `block[a:b]` is a part of it."""

    @property
    def size(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Any: ...


Pair = tuple[Any, Any]  # target and source: blocks of one size


class Mark(Protocol):
    """A point in the order of a channel or of the computation."""

    def query(self) -> bool:
        """Whether everything before it is done."""

    def elapsed_time(self, later: Any, /) -> float:
        """Milliseconds from this mark to a later one; both must have been passed."""


class Channel(Protocol):
    """Copies in order. One thread may use it."""

    def copy(self, pairs: Sequence[Pair]) -> int:
        """Begin with these copies. Returns bytes."""

    def finish(self) -> None:
        """Return once all copies are done."""

    def mark(self) -> Mark | None: ...

    def after(self, mark: Mark | None) -> None:
        """Let later copies wait for `mark`; None is a point long passed."""


class Memory(Protocol):
    """One kind of memory."""

    def create(self, path: Path, size: int) -> Any:
        """A new block that peers find by `path`."""

    def open(self, path: Path) -> Any:
        """The block that another process has created under `path`, to be read only."""

    def buffer(self, size: int) -> Any:
        """A new block that nobody else sees."""

    @property
    def page(self) -> int | None:
        """Blocks of multiples of this many bytes can be joined; None: no blocks can."""

    def join(self, blocks: Sequence[Any]) -> Any:
        """Blocks that `create` or `buffer` gave, one after the other as one block. A block can be
        in several: it is the same memory in all of them.
        """

    def tensor(self, block: Any) -> torch.Tensor:
        """The block, one this process has made, as a uint8 tensor."""

    def channel(self) -> Channel: ...

    def computation(self) -> "Computation | None":
        """What orders copies with the computation; None where a copy is over when it returns."""


class Computation(Protocol):
    """The place where layers are computed, from the thread that computes."""

    def mark(self) -> Mark: ...

    def after(self, mark: Mark) -> None:
        """Let what is computed from now on wait for `mark`; returns at once."""

    def finish(self) -> None:
        """Return once everything computed so far is there."""


class HostFile:
    """A file of shared memory, mapped: writable by the one that creates it, read-only by peers."""

    def __init__(self, path: Path, size: int | None = None) -> None:
        """`size` in bytes creates the file, owner-only; without it an existing one is opened."""
        writable = size is not None
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL if writable else os.O_RDONLY
        descriptor = os.open(path, flags, 0o600)
        try:
            if size is not None:
                # Claims the memory now: a full /dev/shm is an error here, not a SIGBUS later.
                os.posix_fallocate(descriptor, 0, max(size, 1))
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            self._map = mmap.mmap(descriptor, 0, access=access)
        except OSError as error:
            raise OSError(
                error.errno, f"shard of {(size or 0) / 2**20:.0f} MiB: {error.strerror}", str(path)
            ) from None
        finally:
            os.close(descriptor)
        self.data: Bytes = np.frombuffer(self._map, np.uint8)


class HostChannel:
    """The calling thread copies."""

    def copy(self, pairs: Sequence[Pair]) -> int:
        for target, source in pairs:
            np.copyto(target, source)
        return sum(source.size for _, source in pairs)

    def finish(self) -> None:
        pass

    def mark(self) -> None:
        return None

    def after(self, mark: Mark | None) -> None:
        pass


class HostMemory:
    """Shared memory of this machine, in files."""

    page: int | None = None

    def create(self, path: Path, size: int) -> Bytes:
        return HostFile(path, size).data[:size]

    def open(self, path: Path) -> Bytes:
        return HostFile(path).data

    def buffer(self, size: int) -> Bytes:
        return np.empty(size, np.uint8)

    def join(self, blocks: Sequence[Bytes]) -> Bytes:
        raise NotImplementedError("host memory has no pages to join")

    def tensor(self, block: Bytes) -> torch.Tensor:
        return torch.from_numpy(block)

    def channel(self) -> HostChannel:
        return HostChannel()

    def computation(self) -> None:
        return None
