"""Files that other processes wait for.

Owns: how they appear. Must not know: what is in them.
"""

from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write whole or not at all, so that a reader never sees half of it."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(data)
    partial.rename(path)
