"""Prefill and decode as two processes under MPS, one way of sharing a GPU in `sharing.py`.

Each process is limited to its share of the SMs (CUDA_MPS_ACTIVE_THREAD_PERCENTAGE), with a kernel
built for so many; or neither is, and decode has the higher priority (CUDA_MPS_CLIENT_PRIORITY).
Both wait for one moment of the GPU's clock.
    python benchmarks/apk/mps.py            starts the MPS daemon, measures, stops it
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

DEADLINE_S = 60.0  # of a process's answer
SPLITS = ((32, 100), (64, 68), None)  # SMs of decode and prefill; None: all, by priority
ROUNDS = 11
_LEAD_NS = 5_000_000  # from agreeing on a moment to the moment


def _control(variables: dict[str, str], *options: str, words: str = "") -> None:
    done = subprocess.run(
        ["nvidia-cuda-mps-control", *options],
        env={**os.environ, **variables},
        input=words,
        capture_output=True,
        text=True,
        timeout=20,
    )
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip()
        raise RuntimeError(f"nvidia-cuda-mps-control {' '.join(options)} {words}failed: {said}")


@contextlib.contextmanager
def daemon() -> Iterator[dict[str, str]]:
    """MPS for the processes that are given the environment variables it returns. Raises
    RuntimeError where it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
        variables = dict.fromkeys(names, folder)
        _control(variables, "-d")
        try:
            yield variables
        finally:
            _control(variables, words="quit\n")


def side(link: Connection, kind: str, sms: int) -> None:
    """One of the two processes. Answers each message: ("clock", reading) with the GPU's clock,
    ("run", moment) with the microseconds its kernel took from then on.
    """
    import torch
    from fig13 import make_layers
    from pair import (
        DELAY_US,
        READINGS,
        Helpers,
        decode_peer,
        decode_template,
        prefill_peer,
        prefill_template,
        shape,
    )

    stream = torch.cuda.Stream()
    helpers, layer = Helpers(), make_layers(shape(), 1)[0]
    times = torch.zeros(2, dtype=torch.int64, device="cuda")
    make = (prefill_template, prefill_peer) if kind == "prefill" else (decode_template, decode_peer)
    kernels = []
    for reading in READINGS:
        kernels.append(make[1](reading, make[0](reading), layer, sms))
        kernels[-1].launch(stream.cuda_stream)  # loads it
    torch.cuda.synchronize()

    def stamp(n: int) -> None:
        helpers.launch("stamp", times.data_ptr() + 8 * n, stream.cuda_stream)

    def clock() -> int:
        stamp(0)
        torch.cuda.synchronize()
        return int(times[0])

    def run(reading: int, moment: int) -> float:
        begin = moment + (DELAY_US * 1000 if kind == "decode" else 0)
        helpers.launch("until", begin, stream.cuda_stream)
        stamp(0)
        kernels[reading].launch(stream.cuda_stream)
        stamp(1)
        torch.cuda.synchronize()
        first, last = times.tolist()
        return (last - first) / 1e3

    link.send("ready")
    while (message := link.recv()) is not None:
        link.send(clock() if message == "clock" else run(*message))


def answer(link: Connection, of: str) -> Any:
    if not link.poll(DEADLINE_S):
        raise RuntimeError(f"the {of} process under MPS gave no answer within {DEADLINE_S:.0f} s")
    return link.recv()


def pair(variables: dict[str, str], split: tuple[int, int] | None) -> list[tuple[float, float]]:
    """Microseconds of (prefill, decode) beside each other, by reading of the shapes."""
    spawn, links, processes = multiprocessing.get_context("spawn"), {}, []
    for n, kind in enumerate(("decode", "prefill")):
        sms = split[n] if split else 132
        limits = (
            {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{100 * sms / 132:.1f}"}
            if split
            else {"CUDA_MPS_CLIENT_PRIORITY": str(n)}
        )
        os.environ.update(variables | limits)  # of the process that starts next
        links[kind], theirs = spawn.Pipe()
        processes.append(spawn.Process(target=side, args=(theirs, kind, sms), daemon=True))
        processes[-1].start()
        for name in variables | limits:
            del os.environ[name]
    try:
        for kind, link in links.items():
            answer(link, kind)
        found = []
        for reading in range(2):
            took = []
            for _ in range(ROUNDS):
                links["prefill"].send("clock")
                moment = answer(links["prefill"], "prefill") + _LEAD_NS
                for link in links.values():
                    link.send((reading, moment))
                took.append(tuple(answer(links[k], k) for k in ("prefill", "decode")))
            medians = [statistics.median(column) for column in zip(*took[2:], strict=True)]
            found.append((medians[0], medians[1]))
        return found
    finally:
        for link in links.values():
            with contextlib.suppress(OSError):
                link.send(None)
        for process in processes:
            process.join(10)
            process.kill()


def measure() -> dict[str, list[tuple[float, float]]]:
    """(prefill, decode) in microseconds by setting and reading."""
    with daemon() as variables:
        return {
            f"{s[0]}+{s[1]} SMs" if s else "client priority": pair(variables, s) for s in SPLITS
        }


if __name__ == "__main__":
    print(__doc__.splitlines()[0])
    for setting, readings in measure().items():
        print(setting, " ".join(f"prefill {p:.1f} us, decode {d:.1f} us;" for p, d in readings))
