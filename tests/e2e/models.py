"""The checkpoints of the end-to-end tests, made on first use and kept in `.models/`."""

import os
import shutil
from pathlib import Path

from vllm_expertplex.checkpoints.demo import make_demo
from vllm_expertplex.checkpoints.tiny import ARCHITECTURES, make_tiny

MODELS = (*ARCHITECTURES, "demo")
FOLDER = Path(__file__).resolve().parents[2] / ".models"


def checkpoint(name: str, folder: Path = FOLDER) -> Path:
    """The bf16 checkpoint of a model in `MODELS`; made in seconds (demo: half a minute)."""
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
