"""What a deployment occupies on the machine besides memory, and what of it is left at the end.

Owns: noting processes, ports and files while a deployment lives, and looking for them afterwards.
"""

import os
import re
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.e2e.server import Server, command, run_dir_of

_SHM = Path("/dev/shm")


class Footprint:
    """Everything seen of one deployment; call `note` while it lives, `left` when it has ended.

    `scratch` is its TMPDIR. Shared memory is followed by inode, because a named semaphore is mapped
    under another name than it has. Other deployments on the machine do not disturb.
    """

    def __init__(self, server: Server, scratch: Path) -> None:
        self._server = server
        self._scratch = scratch
        self._run_dir: Path | None = None
        self._inodes: set[int] = set()
        self._ports: set[int] = set()
        self._guardians: dict[int, float] = {}  # pid -> when it started

    @property
    def run_dir(self) -> Path | None:
        """The deployment's run directory, once it has been seen."""
        return self._run_dir

    def note(self) -> None:
        if self._run_dir is None:
            self._run_dir = run_dir_of(self._server.process.pid)
        for process in self._server.processes():
            with suppress(psutil.Error, OSError):
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                self._inodes |= {
                    int(inode) for inode in re.findall(r" (\d+) +/dev/shm/", maps, re.MULTILINE)
                }
                self._ports |= {
                    c.laddr.port for c in process.net_connections() if c.status == "LISTEN"
                }
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if self._run_dir is not None and str(self._run_dir) in process.cmdline():
                    self._guardians[process.pid] = process.create_time()

    def note_until_exit(self, deadline_s: float) -> int:
        """Note until the serve process ends; its exit code. Fails the test at the deadline."""
        deadline = time.monotonic() + deadline_s
        while (code := self._server.process.poll()) is None:
            assert time.monotonic() < deadline, (
                f"the serve process still runs after {deadline_s:g} s; {self._server.errors()}"
            )
            self.note()
            time.sleep(0.4)
        return code

    def left(self, grace_s: float = 5.0) -> list[str]:
        """What is still there after at most `grace_s`: the guardian needs a moment to clean up."""
        deadline = time.monotonic() + grace_s
        while (found := self._look()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def _look(self) -> list[str]:
        found = [f"process {p.pid} {command(p)[:80]}" for p in self._server.processes()]
        for pid, started in self._guardians.items():
            with suppress(psutil.Error):
                if psutil.Process(pid).create_time() == started:
                    found.append(f"guardian {pid}")
        if self._run_dir is not None and self._run_dir.exists():
            found.append(f"run directory {self._run_dir}")
        for entry in os.scandir(_SHM):
            with suppress(OSError):
                if entry.stat().st_ino in self._inodes:
                    found.append(f"shared memory {entry.path}")
        found += [f"file {path}" for path in self._scratch.rglob("*")]
        listening = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == "LISTEN"}
        return found + [f"port {port}" for port in sorted(self._ports & listening)]
