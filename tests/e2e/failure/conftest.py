"""Deployments of the failure tests: each with its footprint, nothing checked for them.

Where a test shares a deployment, it says so; killing is done on one of its own or in the last test
that uses it.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.e2e import server as e2e
from tests.e2e.failure.footprint import Footprint
from tests.e2e.models import checkpoint

START_DEADLINE_S = 300.0


class Deployment:
    """A started server, its footprint, and what the tests ask of it."""

    def __init__(self, server: e2e.Server, footprint: Footprint) -> None:
        self.server = server
        self.footprint = footprint

    @property
    def port(self) -> int:
        return self.server.port

    def status(self) -> dict[str, Any]:
        return self.server.http.get("/expertplex/status").json()

    def pid(self, name: str) -> int:
        """The process of server `name`, for example `moe-0`."""
        role, _, rank = name.rpartition("-")
        (pid,) = (
            s["pid"]
            for s in self.status()["servers"]
            if s["role"] == role and s["rank"] == int(rank)
        )
        return pid

    def metrics(self, *names: str) -> dict[str, float]:
        """Every sample of `/metrics` whose name is one of `names`, by name and labels."""
        text = self.server.http.get("/metrics").text
        samples = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {key: float(value) for key, value in samples if key.split("{")[0] in names}

    def ask(self, prompt: str | list[int], **body: Any) -> tuple[int, dict[str, Any]]:
        """One completion: HTTP status and reply."""
        reply = self.server.post("/v1/completions", {"prompt": prompt, "temperature": 0, **body})
        return reply.status_code, reply.json()


Start = Callable[..., Any]


@contextmanager
def started(
    model: Path,
    folder: Path,
    *,
    layout: str = "1P1D1E",
    config: Mapping[str, Any] | None = None,
    healthy: bool = True,
    options: tuple[str, ...] = (),
    port: int | None = None,
) -> Iterator[Deployment]:
    if config is not None:
        file = folder / "config.json"
        file.write_bytes(msgspec.json.encode(config))
        options = (*options, "--expertplex-config", str(file))
    # Short, because Unix sockets are made in it.
    with (
        tempfile.TemporaryDirectory(prefix="xp-", ignore_cleanup_errors=True) as scratch,
        e2e.start(
            model,
            folder / "server.log",
            layout=layout,
            options=options,
            environment={"TMPDIR": scratch, "VLLM_SERVER_DEV_MODE": "1"},
            port=port,
        ) as server,
    ):
        deployment = Deployment(server, Footprint(server, Path(scratch)))
        if healthy:
            server.wait_healthy(START_DEADLINE_S)
            deployment.footprint.note()
        yield deployment


@pytest.fixture(scope="session")
def model() -> Path:
    """The tiny checkpoint every test serves: 16 experts, 4 layers."""
    return checkpoint("minimax-m2")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a deployment, ended with the test: `start(model, layout=..., healthy=False, ...)`."""
    with ExitStack() as stack:

        def enter(model: Path, **options: Any) -> Deployment:
            return stack.enter_context(started(model, tmp_path, **options))

        yield enter


@pytest.fixture(scope="module")
def shared(
    model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Deployment]:
    """One deployment for all tests of a module; its LAYOUT and CONFIG say which."""
    with started(
        model,
        tmp_path_factory.mktemp("shared"),
        layout=request.module.LAYOUT,
        config=request.module.CONFIG,
    ) as deployment:
        yield deployment
