"""What an engine measured of itself at start-up.

Owns: the record. Must not know: how it is measured, what is made of it.
"""

from pathlib import Path

import msgspec

from vllm_expertplex.layout import Server


class Speed(msgspec.Struct, frozen=True):
    """gather_s: seconds of the slowest layer's gather, 0 when nothing is gathered. pass_s: seconds
    of a forward pass over `tokens` unrelated tokens, gathers left out.
    """

    gather_s: float
    pass_s: float
    tokens: int

    def write(self, run_dir: Path, server: Server) -> None:
        (run_dir / f"speed-{server.name}.json").write_bytes(msgspec.json.encode(self))

    @classmethod
    def read(cls, run_dir: Path, server: Server) -> "Speed":
        return msgspec.json.decode((run_dir / f"speed-{server.name}.json").read_bytes(), type=cls)
