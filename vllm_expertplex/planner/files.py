"""Files that a user names: read, checked before long work, and written.

Owns: what is wrong with a path, in one line. Must not know: formats.
"""

import os
from pathlib import Path


def read(what: str, path: str) -> str:
    """The text of a file. Raises ValueError that begins with `what` and the path."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{what} {path!r}: {error.strerror}; give a file") from None
    except UnicodeDecodeError:
        raise ValueError(
            f"{what} {path!r}: found bytes that are no text; give a text file"
        ) from None


def check_writable(option: str, path: str | None) -> None:
    """Raise ValueError when a file given with `option` cannot be written; None is no file."""
    if path is None:
        return
    file = Path(path).expanduser()
    folder = file.parent
    if file.is_dir():
        found = "is a directory"
    elif not folder.is_dir():
        found = f"{folder} is no directory"
    elif not os.access(file if file.exists() else folder, os.W_OK):
        found = "no permission to write"
    else:
        return
    raise ValueError(f"{option} {path!r}: {found}; name a file in a directory that exists")


def write(path: str, data: bytes) -> None:
    """Write a file whole. Raises ValueError when the disk does not take it."""
    try:
        Path(path).expanduser().write_bytes(data)
    except OSError as error:
        raise ValueError(f"writing {path}: {error.strerror}") from None
