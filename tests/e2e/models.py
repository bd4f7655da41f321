"""The checkpoints of the end-to-end tests, made on first use and kept in `.models/`."""

import os
import shutil
import tempfile
from pathlib import Path

from vllm_expertplex.checkpoints.demo import make_demo
from vllm_expertplex.checkpoints.fp8 import write_fp8_pair
from vllm_expertplex.checkpoints.tiny import ARCHITECTURES, make_tiny

FP8 = "minimax-m2-fp8"  # block-scaled, like the published MiniMax-M2
MODELS = (*ARCHITECTURES, "demo", FP8)
FOLDER = Path(__file__).resolve().parents[2] / ".models"


def checkpoint(name: str, folder: Path = FOLDER) -> Path:
    """The checkpoint of a model in `MODELS`; made in seconds (demo: half a minute)."""
    if name == FP8:
        return _fp8_pair(folder)[0]
    path = folder / name
    if not (path / "config.json").exists():
        partial = folder / f".{name}.{os.getpid()}"
        if name == "demo":
            make_demo(partial)
        else:
            make_tiny(partial, name)
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)  # another process never sees half a checkpoint
    return path


def baseline(name: str, folder: Path = FOLDER) -> Path:
    """What plain vLLM serves to compare with: the same checkpoint, or where plain vLLM cannot take
    its FP8 on a CPU, its twin in bf16 with exactly the same values.
    """
    return _fp8_pair(folder)[1] if name == FP8 else checkpoint(name, folder)


def _fp8_pair(folder: Path) -> tuple[Path, Path]:
    fp8, twin = folder / FP8, folder / f"{FP8}-in-bf16"
    if not (twin / "config.json").exists() or not (fp8 / "config.json").exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / "fp8", Path(scratch) / "twin"
            write_fp8_pair(checkpoint(FP8.removesuffix("-fp8"), folder), *made)
            for path, new in zip((fp8, twin), made, strict=True):
                shutil.rmtree(path, ignore_errors=True)
                new.rename(path)
    return fp8, twin
