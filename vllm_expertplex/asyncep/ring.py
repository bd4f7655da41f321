"""The near tier of offloading: the shards of the next few layers, where peers can read them fast.

Owns: the ring's file, who may read which slot when, and the thread that fills it.
Must not know: what is in a shard, or how layers are computed.

All experts are in host memory. The ring holds this engine's part of the layers to come; on a GPU it
is GPU memory, filled by host-to-device copies on one channel while another pulls the next layer
from all rings. A peer may be elsewhere in its pass and find that a layer is not there: it then
reads that part from host memory. So nobody waits for anybody.
"""

import mmap
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from vllm_expertplex.asyncep.shards import Bytes, ShardFile

_EMPTY = -1


class Ring:
    """`slots` slots of `slot_bytes`. A slot's version is odd while it is written, and counts up."""

    def __init__(self, path: Path, slots: int, slot_bytes: int, *, create: bool = False) -> None:
        header = -(-16 * slots // mmap.PAGESIZE) * mmap.PAGESIZE
        file = ShardFile(path, header + slots * slot_bytes) if create else ShardFile(path)
        words = file.data[: 16 * slots].view(np.int64)
        self._versions, self._layers = words[:slots], words[slots:]
        self._slots = [
            file.data[start : start + slot_bytes]
            for start in range(header, header + slots * slot_bytes, slot_bytes or 1)
        ][:slots]
        if create:
            self._layers[:] = _EMPTY

    def __len__(self) -> int:
        return len(self._versions)

    def write(self, slot: int, layer: int, part: Bytes) -> None:
        """Put `part` of `layer` into `slot`. Only the ring's owner may."""
        self._versions[slot] += 1
        self._layers[slot] = layer
        np.copyto(self._slots[slot][: part.size], part)
        self._versions[slot] += 1

    def read(self, layer: int, size: int, take: Callable[[Bytes], int]) -> int | None:
        """`take` the `size` bytes of `layer`, and return what it returns; None if it is not here,
        or was overwritten meanwhile (`take` has then copied something to be overwritten).
        """
        for slot in range(len(self)):
            version = int(self._versions[slot])
            if version % 2 or int(self._layers[slot]) != layer:
                continue
            taken = take(self._slots[slot][:size])
            if int(self._versions[slot]) == version:
                return taken
        return None


class Prefetcher:
    """A thread that keeps the layers after the one last gathered in the ring.

    `part(layer)` is this engine's part of gathered layer `layer` in host memory.
    """

    def __init__(self, ring: Ring, layers: int, part: Callable[[int], Bytes]) -> None:
        self._ring, self._layers, self._part = ring, layers, part
        self._gathered = 0
        self._stopped = False
        self._changed = threading.Condition()
        self.bytes = 0
        self._thread = threading.Thread(target=self._run, name="asyncep-prefetch", daemon=True)
        self._thread.start()

    def gathered(self) -> None:
        """This engine has gathered one more layer."""
        with self._changed:
            self._gathered += 1
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        ticket = 0
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda ticket=ticket: (  # type: ignore[misc]
                        self._stopped or ticket < self._gathered + len(self._ring)
                    )
                )
                if self._stopped:
                    return
            layer = ticket % self._layers
            part = self._part(layer)
            self._ring.write(ticket % len(self._ring), layer, part)
            self.bytes += part.size
            ticket += 1
