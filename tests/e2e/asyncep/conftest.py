"""Deployments of `--executor asyncep`, and plain vLLM's answers to compare with."""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ..models import checkpoint
from ..parity.suite import Answers, run
from ..server import Server, ServerError, serve
from .requests import chosen

MODEL = "qwen3-moe"
DTYPE = "float32"  # answers must then be equal but for rounding, whatever runs beside them

Start = Callable[..., AbstractContextManager[Server]]


@pytest.fixture(scope="package")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="package")
def start(logs: Path) -> Start:
    """Starts a deployment from options of its configuration; leaving one must leave nothing."""

    @contextmanager
    def start(*options: str, model: str = MODEL, **config: Any) -> Iterator[Server]:
        name = f"{model}-{'-'.join(f'{key}{value}' for key, value in config.items())}"
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(config, file)
            file.flush()
            asyncep = ("--executor", "asyncep", "--asyncep-config", file.name)
            with serve(
                checkpoint(model),
                logs / f"{name}.log",
                options=("--dtype", DTYPE, *asyncep, *options),
            ) as server:
                yield server
            if left := server.leftovers():
                raise ServerError(f"left behind after a normal stop: {left}; {server.errors()}")

    return start


@pytest.fixture(scope="package")
def plain(logs: Path) -> Answers:
    """Plain vLLM's answers to the chosen requests."""
    with serve(checkpoint(MODEL), logs / "plain.log", options=("--dtype", DTYPE)) as server:
        return run(server, only=chosen)
