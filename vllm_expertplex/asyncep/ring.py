"""The near tier of offloading: the shards of the next few layers, where peers can read them fast.

Owns: the ring's slots, who may read which one when, and the thread that fills them.
Must not know: what is in a shard, or how layers are computed.

All experts are in host memory. The ring holds this engine's part of the layers to come, where it is
computed: on a GPU one channel fills it from the host while another pulls the next layer from all
rings. A peer may be elsewhere in its pass and find that a layer is not there: it then
reads that part from host memory. So nobody waits for anybody; an engine waits for its own ring
only, which would else send the same bytes over the same link a second time.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vllm_expertplex.asyncep.memory import Block, Channel, HostFile, Memory

_EMPTY = -1


class Ring:
    """`slots` slots of `slot_bytes` in `memory`. What they hold is said in a file of host memory:
    a slot's version is odd while it is written, and counts up.
    """

    def __init__(
        self, path: Path, slots: int, slot_bytes: int, memory: Memory, *, create: bool = False
    ) -> None:
        """Peers open what the owner has created. The file at `path` comes last and whole."""
        places = [path.with_name(f"{path.name}-{slot}") for slot in range(slots)]
        if create:
            self._slots: list[Any] = [memory.create(place, slot_bytes) for place in places]
            partial = path.with_suffix(".partial")
            words = HostFile(partial, 16 * slots).data.view(np.int64)
            words[slots:] = _EMPTY
            partial.rename(path)
        else:
            words = HostFile(path).data.view(np.int64)
            self._slots = [memory.open(place) for place in places]
        self._versions, self._layers = words[:slots], words[slots:]

    def __len__(self) -> int:
        return len(self._versions)

    def write(self, slot: int, layer: int, part: Block, channel: Channel) -> None:
        """Put `part` of `layer` into `slot`. Only the ring's owner may."""
        self._versions[slot] += 1
        self._layers[slot] = layer
        channel.copy([(self._slots[slot][: part.size], part)])
        channel.finish()
        self._versions[slot] += 1

    def read(self, layer: int, size: int, take: Callable[[Any], int]) -> int | None:
        """`take` the `size` bytes of `layer`, and return what it returns; None if it is not here,
        or was overwritten meanwhile (`take` has then copied something to be overwritten).

        `take` returns when it has copied.
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

    def __init__(
        self, ring: Ring, layers: int, part: Callable[[int], Block], channel: Channel
    ) -> None:
        self._ring, self._layers, self._part, self._channel = ring, layers, part, channel
        self._gathered = self._fetched = 0
        self._stopped = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="asyncep-prefetch", daemon=True)
        self._thread.start()

    def gathered(self) -> None:
        """This engine has gathered one more layer."""
        with self._changed:
            self._gathered += 1
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Return once the layer to be gathered next is in the ring, where it stays until it is
        `gathered`. Raises TimeoutError, or RuntimeError where fetching has failed.
        """
        with self._changed:
            came = self._changed.wait_for(
                lambda: self._error is not None or self._fetched > self._gathered, timeout_s
            )
            if self._error is not None:
                raise RuntimeError(f"fetching offloaded experts failed: {self._error}")
            if not came:
                raise TimeoutError(f"offloaded experts were not fetched within {timeout_s:g} s")

    def close(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._stopped or self._fetched < self._gathered + len(self._ring)
                    )
                    if self._stopped:
                        return
                layer = self._fetched % self._layers
                slot = self._fetched % len(self._ring)
                self._ring.write(slot, layer, self._part(layer), self._channel)
                with self._changed:
                    self._fetched += 1
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
