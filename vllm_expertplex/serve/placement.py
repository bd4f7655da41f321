"""Which GPU each server runs on, and what its process must know about that.

Owns: the rule below, the file through which processes learn their place. Must not know: what
servers do, CUDA.

With enough GPUs for the ranks of an attention server beside the MoE servers, those take the last
ones, one each and for themselves, and attention servers the first ones, in turn, one for each rank.
With fewer, each kind goes over all GPUs in turn. Servers that share a GPU do so through MPS: a MoE
server holds a share of its SMs for as long as it runs, attention servers see no more than the
others (a kernel with a CTA for every SM it sees would run in several waves on fewer), and prefill
is limited to a share of those where other attention servers need them, too (priorities alone do not
protect decode).
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec

from vllm_expertplex.layout import MOE, PREFILL, Layout, Server

_DEVICES = "CUDA_VISIBLE_DEVICES"
_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
_SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


class Place(msgspec.Struct, frozen=True):
    """One server's GPU, or GPUs: ids as in CUDA_VISIBLE_DEVICES, and how many servers are there."""

    gpu: str
    servers: int = 1
    mps: bool = False
    sm_percent: int = 100  # of the GPU's SMs, under MPS

    @property
    def gpus(self) -> list[str]:
        return self.gpu.split(",")


def place(
    layout: Layout,
    gpus: Sequence[str],
    prefill_sm_percent: int,
    moe_sm_percent: int,
    ranks: int = 1,
) -> dict[str, Place]:
    """Server name -> place, for the GPUs with these ids. Raises ValueError where there are too few.

    `ranks`: of an attention server, each on a GPU of its own. They take GPUs in runs.
    `moe_sm_percent`: of a GPU's SMs, for the MoE servers that share it with attention servers;
    `prefill_sm_percent`: of what these leave.
    """
    if not gpus:
        raise ValueError("no GPU is visible; set CUDA_VISIBLE_DEVICES, or serve on CPU")
    if len(gpus) < ranks:
        raise ValueError(
            f"--tensor-parallel-size {ranks} needs as many GPUs; {len(gpus)} are visible"
        )
    own = layout.moe if len(gpus) >= layout.moe + ranks else 0
    moe = _in_turn(layout.moe_servers, gpus[-own:], 1)  # all of them where own is 0
    attention = _in_turn(layout.attention_servers, gpus[: len(gpus) - own], ranks)
    experts, readers = (Counter(chain(*taken.values())) for taken in (moe, attention))

    def find(server: Server, mine: Sequence[str]) -> Place:
        both = max(experts[gpu] + readers[gpu] for gpu in mine)
        percent, beside = 100, max(experts[gpu] for gpu in mine)
        if server.role == MOE:
            if readers[mine[0]]:
                percent = max(1, moe_sm_percent // beside)
        elif beside:
            # CUDA rounds every share down to an even number of SMs; one percent more than is left
            # is the most that never is more SMs than are left.
            percent = 101 - moe_sm_percent
        if server.role == PREFILL and max(readers[gpu] for gpu in mine) > 1:
            percent = max(1, prefill_sm_percent * percent // 100)
        return Place(",".join(mine), both, both > 1, percent)

    return {server.name: find(server, mine) for server, mine in (attention | moe).items()}


def _in_turn(
    servers: Sequence[Server], gpus: Sequence[str], each: int
) -> dict[Server, Sequence[str]]:
    runs = [gpus[i : i + each] for i in range(0, len(gpus) - each + 1, each)]
    return {server: runs[index % len(runs)] for index, server in enumerate(servers)}


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
