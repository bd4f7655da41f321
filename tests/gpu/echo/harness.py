"""Starts the echoing MoE servers from a test or benchmark, and talks to them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec

from vllm_expertplex.comm.peer import SlotLayout


class EchoServers:
    """The process of `server.py`; leave the context to end it."""

    def __init__(
        self, run_dir: Path, layout: str, slots: list[SlotLayout], device: int, ctas: int = 64
    ) -> None:
        spec = {"run_dir": str(run_dir), "layout": layout, "slots": slots}
        path = run_dir / "echo.json"
        path.write_bytes(msgspec.json.encode({**spec, "ctas": ctas}))
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("server.py")), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # As the serve command places servers: a process sees the GPU it runs on and no other.
            env={**os.environ, "CUDA_VISIBLE_DEVICES": str(device)},
        )

    def _line(self, what: str) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the echo servers ended before {what}; see their traceback")
        return line

    def await_start(self) -> None:
        """Return once the kernels are queued: both sides have opened each other's memory."""
        self._line("they started")

    def stop(self) -> list[list[list[int]]]:
        """End the kernels, keep the memory. ns that each operation took, [server][source][i]."""
        assert self._process.stdin is not None
        self._process.stdin.write("stop\n")
        self._process.stdin.flush()
        return json.loads(self._line("they stopped"))

    def __enter__(self) -> EchoServers:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
