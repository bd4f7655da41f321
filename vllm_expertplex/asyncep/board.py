"""An engine's counters in shared memory, for the API server to read at any time.

Owns: the file and its fields. Must not know: what is counted when.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from vllm_expertplex.layout import Server


class Counters(NamedTuple):
    """Totals since the start. `waited_ns`: time the computing side waited for gathers. `layers`:
    MoE layers computed. `far_bytes`: of those gathered, from host memory although a near tier was
    to have them.
    """

    gathers: int = 0
    gather_ns: int = 0
    gathered_bytes: int = 0
    waits: int = 0
    waited_ns: int = 0
    layers: int = 0
    far_bytes: int = 0


_FIELDS = Counters._fields


class Board:
    """Written by one engine (`publish`), read by others (`read`). Every field is one int64, so a
    reader sees each whole, though not all of the same moment.
    """

    def __init__(self, run_dir: Path, server: Server, *, create: bool = False) -> None:
        path = run_dir / f"board-{server.name}"
        if create:
            path.touch(mode=0o600)
            path.write_bytes(bytes(8 * len(_FIELDS)))
        self._words = np.memmap(path, np.int64, "r+", shape=(len(_FIELDS),))

    def publish(self, counters: Counters) -> None:
        self._words[:] = counters

    def read(self) -> Counters:
        return Counters(*(int(word) for word in self._words))
