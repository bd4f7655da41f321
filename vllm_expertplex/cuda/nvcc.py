"""Building kernels with the installed CUDA toolkit, and keeping the results.

Owns: finding `nvcc`, the flags every kernel shares, the cache. Must not know: what the kernels do.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

OLDEST = (12, 9)  # release that compiles the kernels
_TOOLKIT = "/usr/local/cuda/bin"
FLAGS = ("-std=c++20", "-cubin", "-gencode=arch=compute_90a,code=sm_90a", "-O3")


def find_nvcc() -> str:
    """The compiler's path. Raises RuntimeError that says how to get it."""
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=_TOOLKIT)
    if nvcc is None:
        raise RuntimeError(
            f"nvcc not found on PATH or in {_TOOLKIT}: install the CUDA toolkit, "
            f"{'.'.join(map(str, OLDEST))} or newer"
        )
    return nvcc


def csrc() -> Path:
    """The repository's C++ and CUDA sources."""
    return Path(__file__).resolve().parents[2] / "csrc"


def cubin(source: Path, dependencies: Sequence[Path], flags: Sequence[str] = ()) -> Path:
    """The compiled `source`, from the cache or built now.

    `dependencies`: every other file that decides the result. Raises RuntimeError with the
    compiler's output.
    """
    nvcc = find_nvcc()
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256("\0".join([*FLAGS, *flags, version]).encode())
    for path in [source, *sorted(dependencies)]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    kept = cache_dir("kernels") / f"{source.parent.name}-{digest.hexdigest()[:24]}.cubin"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
            built = Path(scratch) / "built.cubin"
            command = [nvcc, *FLAGS, *flags, f"-I{csrc()}", str(source), "-o", str(built)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"nvcc failed on {source}:\n{done.stderr[-4000:]}")
            built.replace(kept)  # atomic: several servers may start at once
    return kept


def cache_dir(kind: str) -> Path:
    """Where built things of one kind are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "vllm-expertplex" / kind
