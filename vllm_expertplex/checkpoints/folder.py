"""A checkpoint's folder, which looks finished only when it is.

Owns: the order in which files appear. Must not know: what is in them.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONFIG = "config.json"  # by which everybody recognises a checkpoint


@contextmanager
def written_whole(out: Path) -> Iterator[Path]:
    """A folder inside `out` to write into; its files move up at the end, CONFIG last. Where the
    body raises, `out` is left as it was.
    """
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=out) as scratch:
        part = Path(scratch)
        yield part
        # An older checkpoint must not lend its configuration to half of a new one.
        (out / CONFIG).unlink(missing_ok=True)
        for file in sorted(part.iterdir(), key=lambda file: file.name == CONFIG):
            os.replace(file, out / file.name)
