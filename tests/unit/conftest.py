"""What unit tests share: tiny checkpoints, and one thread for torch, as cores may be few."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny checkpoint, made when first asked for.

    A name is an architecture of `make-model`, or one with `-fp8` for its block-scaled FP8 form.
    """
    from vllm_expertplex.checkpoints.fp8 import write_fp8_pair
    from vllm_expertplex.checkpoints.tiny import make_tiny

    made: dict[str, Path] = {}

    def checkpoint(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp("tiny") / name
            if name.endswith("-fp8"):
                source = checkpoint(name.removesuffix("-fp8"))
                write_fp8_pair(source, folder, folder.with_name(f"{name}-twin"))
            else:
                make_tiny(folder, name)
            made[name] = folder
        return made[name]

    return checkpoint
