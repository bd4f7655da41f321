"""What servers tell each other through the run directory, and the handshake over it.

Owns: the records' format and what must agree. Must not know: how servers are started.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from vllm_expertplex import __version__
from vllm_expertplex.files import write_whole
from vllm_expertplex.layout import Server


class Agreement(msgspec.Struct, frozen=True):
    """Everything that must be the same on all servers of a deployment."""

    package_version: str
    vllm_version: str
    model: str
    revision: str | None
    architectures: list[str]
    dtype: str
    hidden_size: int
    experts: int
    moe_layers: list[str]


class ServerRecord(msgspec.Struct, frozen=True):
    """One server's word that it is loaded: who it is, what it holds, what it assumes."""

    role: str
    rank: int
    pid: int
    device: str
    weight_bytes: int
    agreement: Agreement

    @property
    def server(self) -> Server:
        return Server(self.role, self.rank)

    @classmethod
    def of(
        cls, server: Server, vllm_config: Any, weight_bytes: int, moe_layers: list[str]
    ) -> "ServerRecord":
        """The record of this process. `vllm_config` is vLLM's VllmConfig."""
        from vllm.version import __version__ as vllm_version

        model = vllm_config.model_config
        return cls(
            server.role,
            server.rank,
            os.getpid(),
            str(vllm_config.device_config.device_type),
            weight_bytes,
            Agreement(
                __version__,
                vllm_version,
                model.model,
                model.revision,
                list(model.architectures),
                str(model.dtype).removeprefix("torch."),
                model.get_hidden_size(),
                model.get_num_experts(),
                moe_layers,
            ),
        )


class MismatchError(RuntimeError):
    """Servers of one deployment assume different things."""


def check_agreement(records: list[ServerRecord]) -> None:
    """The handshake: compare every record with the first. Raises MismatchError with both values."""
    first, *others = records
    for other in others:
        for field in Agreement.__struct_fields__:
            here, there = getattr(first.agreement, field), getattr(other.agreement, field)
            if here != there:
                raise MismatchError(
                    f"{field} differs: {first.server.name} has {_short(here)}, "
                    f"{other.server.name} has {_short(there)}; all servers of a deployment must "
                    "run the same model and the same versions"
                )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"


def write_record(run_dir: Path, record: ServerRecord) -> None:
    write_whole(run_dir / f"server-{record.server.name}.json", msgspec.json.encode(record))


def read_record(run_dir: Path, server: Server) -> ServerRecord | None:
    """The record of `server`, or None while it has not loaded."""
    try:
        data = (run_dir / f"server-{server.name}.json").read_bytes()
    except FileNotFoundError:
        return None
    return msgspec.json.decode(data, type=ServerRecord)


def write_error(run_dir: Path, server: Server, message: str) -> None:
    """Leave word of why `server` could not start."""
    write_whole(run_dir / f"error-{server.name}.txt", message.encode())


@contextmanager
def errors_written(run_dir: Path, server: Server) -> Iterator[None]:
    """Leave word of an error in the body, and raise it: vLLM tells an engine's parent only that the
    engine failed, and the engine only that a worker did. The first word stays.
    """
    try:
        yield
    except Exception as error:
        if read_error(run_dir, server) is None:
            write_error(run_dir, server, f"{type(error).__name__}: {error}")
        raise


def read_error(run_dir: Path, server: Server) -> str | None:
    try:
        return (run_dir / f"error-{server.name}.txt").read_text()
    except FileNotFoundError:
        return None


def write_ports(run_dir: Path, ports: dict[str, int]) -> None:
    """Server name -> port of its KV connector's side channel."""
    write_whole(run_dir / "ports.json", msgspec.json.encode(ports))


def read_ports(run_dir: Path) -> dict[str, int]:
    return msgspec.json.decode((run_dir / "ports.json").read_bytes(), type=dict[str, int])
