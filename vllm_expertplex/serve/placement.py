"""Which GPU each server runs on, and what its process must know about that.

Owns: the rule below, the file through which processes learn their place. Must not know: what
servers do, CUDA.

MoE servers take the last GPUs, one each and for themselves: their kernel holds every SM for as long
as it runs. Attention servers take the first ones, in turn; where several share a GPU, they do so
through MPS, with prefill limited to a share of the SMs (priorities alone do not protect decode).
With a single GPU everything shares it by time slices, which works and is slow.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from vllm_expertplex.layout import PREFILL, Layout, Server

_DEVICES = "CUDA_VISIBLE_DEVICES"
_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
_SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


class Place(msgspec.Struct, frozen=True):
    """One server's GPU: its id as in CUDA_VISIBLE_DEVICES, and how many servers are on it."""

    gpu: str
    servers: int = 1
    mps: bool = False
    sm_percent: int = 100  # of the GPU's SMs, under MPS


def place(layout: Layout, gpus: Sequence[str], prefill_sm_percent: int) -> dict[str, Place]:
    """Server name -> place, for the GPUs with these ids. Raises ValueError where the layout's MoE
    servers cannot have one each.
    """
    if not gpus:
        raise ValueError("no GPU is visible; set CUDA_VISIBLE_DEVICES, or serve on CPU")
    servers = list(layout)
    if len(gpus) == 1:
        return {server.name: Place(gpus[0], len(servers)) for server in servers}
    if len(gpus) <= layout.moe:
        raise ValueError(
            f"layout {layout} needs a GPU for each MoE server and one more for attention, "
            f"{layout.moe + 1} in all; {len(gpus)} are visible: use fewer MoE servers"
        )
    taken = gpus[: len(gpus) - layout.moe]
    attention = {
        server: taken[index % len(taken)] for index, server in enumerate(layout.attention_servers)
    }
    sharing = Counter(attention.values())
    places = {
        server.name: Place(
            gpu,
            sharing[gpu],
            sharing[gpu] > 1,
            prefill_sm_percent if sharing[gpu] > 1 and server.role == PREFILL else 100,
        )
        for server, gpu in attention.items()
    }
    own = gpus[len(gpus) - layout.moe :]
    return places | {moe.name: Place(gpu) for moe, gpu in zip(layout.moe_servers, own, strict=True)}


def visible_gpus(count: int) -> list[str]:
    """Ids of the `count` GPUs that this process sees, as its children may name them."""
    named = os.environ.get(_DEVICES)
    return named.split(",") if named else [str(index) for index in range(count)]


def mps_pipes(run_dir: Path) -> Path:
    """Where the MPS daemon of a run and its clients meet."""
    return run_dir / "mps"


def write_places(run_dir: Path, places: dict[str, Place]) -> None:
    (run_dir / "places.json").write_bytes(msgspec.json.encode(places))


def read_place(run_dir: Path, server: Server) -> Place | None:
    """Where `server` runs; None in a deployment without GPUs."""
    try:
        data = (run_dir / "places.json").read_bytes()
    except FileNotFoundError:
        return None
    return msgspec.json.decode(data, type=dict[str, Place])[server.name]


def take(run_dir: Path, server: Server) -> Place | None:
    """Make this process one on `server`'s GPU. CUDA reads these variables when it starts."""
    mine = read_place(run_dir, server)
    if mine is None:
        return None
    os.environ[_DEVICES] = mine.gpu
    os.environ.pop(_SHARE, None)
    if mine.mps:
        os.environ[_PIPES] = str(mps_pipes(run_dir))
        if mine.sm_percent < 100:
            os.environ[_SHARE] = str(mine.sm_percent)
    return mine


def run(run_dir: Path, server: Server, main: Callable[..., None], *arguments: Any) -> None:
    """Entry point of a process: take `server`'s place, then call `main(*arguments)`."""
    take(run_dir, server)
    main(*arguments)
