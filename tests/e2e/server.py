"""Starts `vllm serve`, plain or with ExpertPlex, waits until it is healthy, and stops it.

Every process of a server carries a mark in its environment, so what it leaves behind is found
whatever happened to its parents.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

MODEL_NAME = "model"  # what requests call the model, whatever its path
START_DEADLINE_S = 600.0
STOP_DEADLINE_S = 40.0
_MARK = "EXPERTPLEX_TEST_SERVER"
_OPTIONS = (
    *("--enforce-eager", "--max-model-len", "2048"),
    *("--max-num-batched-tokens", "512"),  # so that longer prompts take several chunks
    *("--max-num-seqs", "32"),
)
_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB, for each attention server
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


class ServerError(RuntimeError):
    """A server did not start, did not stop, or left something behind; the message says what."""


class Server:
    """A started server. Use `serve` to make one."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path, mark: str) -> None:
        self.process = process
        self.port = port
        self.log = log
        self.start_s = 0.0  # until /health answered 200
        self.http = httpx.Client(base_url=self.base_url, timeout=120, trust_env=False)
        self._mark = mark
        self._shm: set[Path] = set()  # shared-memory files its processes have mapped

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        """POST to the server's `path`; any status is returned, not raised."""
        return self.http.post(path, json={"model": MODEL_NAME, **body})

    def processes(self) -> list[psutil.Process]:
        """Every live process of this server, the first one included."""
        # Not psutil's environ(): it stops early in a process that has set its title, as vLLM's do.
        mark = f"{_MARK}={self._mark}".encode()
        found = []
        for process in psutil.process_iter():
            try:
                marked = mark in Path(f"/proc/{process.pid}/environ").read_bytes()
                if marked and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def wait_healthy(self, deadline_s: float) -> None:
        """Return once /health answers 200. Raises ServerError with the log's errors."""
        begun = time.monotonic()
        while time.monotonic() - begun < deadline_s:
            if (status := self.process.poll()) is not None:
                raise ServerError(f"the server ended with {status} at start-up; {self.errors()}")
            try:
                if self.http.get("/health", timeout=5).status_code == 200:
                    self.start_s = time.monotonic() - begun
                    self._note_shared_memory()
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.25)
        raise ServerError(f"not healthy after {deadline_s:.0f} s; {self.errors()}")

    def errors(self) -> str:
        """The errors in the log, or its last lines when there are none."""
        lines = self.log.read_text(errors="replace").splitlines()
        found = [line for line in lines if re.search(r"\w(Error|Exception)\b|error:", line)]
        tail = "\n".join(list(dict.fromkeys(found))[-12:] or lines[-12:])
        return f"from {self.log}:\n{tail}"

    def tracebacks(self) -> int:
        """Exceptions in the log."""
        return self.log.read_text(errors="replace").count("Traceback (most recent call last)")

    def stop(self, deadline_s: float = STOP_DEADLINE_S) -> None:
        """End the server as Ctrl-C does. Raises ServerError when it has to be killed."""
        self.http.close()
        self._note_shared_memory()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise ServerError(
                f"still running {deadline_s:.0f} s after SIGINT; {self.errors()}"
            ) from None

    def kill(self) -> None:
        """SIGKILL whatever is left of the server, and wait for it."""
        left = self.processes()
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=5)
        self.process.wait(5)

    def leftovers(self, grace_s: float = 5.0) -> list[str]:
        """What an ended server left: processes and shared-memory files, after `grace_s` at most."""
        deadline = time.monotonic() + grace_s
        while True:
            found = [f"process {p.pid} {command(p)[:80]}" for p in self.processes()]
            found += [str(path) for path in sorted(self._shm) if path.exists()]
            if run_dir := run_dir_of(self.process.pid):
                found.append(str(run_dir))
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.2)

    def _note_shared_memory(self) -> None:
        for process in self.processes():
            try:
                maps = Path(f"/proc/{process.pid}/maps").read_text()
            except OSError:
                continue  # ended meanwhile
            self._shm |= {Path(path) for path in re.findall(r"/dev/shm/\S+$", maps, re.MULTILINE)}


def run_dir_of(pid: int) -> Path | None:
    """The run directory of the serve process `pid`, while it exists."""
    for owner in Path("/dev/shm").glob("expertplex-*/owner"):
        with suppress(OSError, IndexError):  # being written, or removed
            if owner.read_text().split()[0] == str(pid):
                return owner.parent
    return None


def command(process: psutil.Process) -> str:
    """The command line of a process, which may end at any moment."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return "(ended meanwhile)"


def interrupt_on_sigterm() -> None:
    """Make SIGTERM (a `timeout`, a cancelled CI job) end this process as Ctrl-C does: its servers
    are then ended too, instead of living on.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def start(
    model: Path,
    log: Path,
    *,
    layout: str | None = None,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    port: int | None = None,
) -> Iterator[Server]:
    """Start a server and yield it at once; kill what is left of it at the end, and check nothing.

    `layout` None is plain vLLM. For tests of failed starts; others want `serve`.
    """
    port = port or free_port()
    mark = uuid.uuid4().hex
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL_NAME]
    if layout is not None:
        command += ["--executor", "expertplex", "--expertplex-layout", layout]
    command += [*_OPTIONS, *options]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **_ENVIRONMENT, **(environment or {}), _MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(process, port, log, mark)
    try:
        yield server
    finally:
        server.http.close()
        server.kill()


@contextmanager
def serve(
    model: Path, log: Path, *, start_deadline_s: float = START_DEADLINE_S, **options: Any
) -> Iterator[Server]:
    """A healthy server; afterwards it is stopped, and ExpertPlex must have left nothing behind.

    Plain vLLM is not held to that: it leaves named semaphores in /dev/shm. `options` are those of
    `start`. Raises ServerError, unless the body already raised.
    """
    with start(model, log, **options) as server:
        server.wait_healthy(start_deadline_s)
        yield server
        before = server.tracebacks()
        server.stop()
        if options.get("layout") and server.tracebacks() > before:
            raise ServerError(f"a normal stop logged an exception; {server.errors()}")
        if options.get("layout") and (left := server.leftovers()):
            raise ServerError(f"left behind after a normal stop: {left}; {server.errors()}")
