"""Leaving nothing behind: processes, sockets and shared memory of a run.

Owns: finding and ending what belongs to a run directory. Standard library only: the guardian
process runs it. Must not know: roles, vLLM.

Every process of a deployment is started with the run directory in its environment, so /proc tells
which ones belong to it whatever happened to the process that started them.
"""

import contextlib
import fcntl
import os
import re
import shutil
import signal
import time
from pathlib import Path
from typing import IO

_TRACKER = b"multiprocessing.resource_tracker"
_SHM = Path("/dev/shm")


def processes_of(
    run_dir: Path, variable: str, *, exclude: set[int], trackers: bool = True
) -> list[int]:
    """Pids whose environment has `variable` set to `run_dir`; resource trackers if asked for.

    The guardian is never among them.
    """
    wanted = f"{variable}={run_dir}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) in exclude:
            continue
        try:
            environment = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
        except OSError:
            continue  # gone, or another user's
        if wanted in environment and (trackers or not _is_tracker(int(entry))):
            found.append(int(entry))
    return found


def _is_tracker(pid: int) -> bool:
    """Python's resource tracker removes leaked shared memory once its process is gone."""
    try:
        return _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill_all(pids: list[int]) -> None:
    """SIGKILL, and wait until they are gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.01)


def end_run(run_dir: Path, variable: str, *, exclude: set[int], trackers: bool = True) -> list[int]:
    """Kill what is left of a run, then remove its files. Returns the pids that were killed.

    Resource trackers go last: when the last process of theirs has ended, they remove the semaphores
    and shared memory that were left, and exit. A process that has one itself says
    `trackers=False`, because its tracker must outlive it.
    """
    killed = processes_of(run_dir, variable, exclude=exclude, trackers=False)
    segments = _open_segments(killed, _started_ns(run_dir))
    kill_all(killed)
    if trackers:
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline and processes_of(run_dir, variable, exclude=exclude):
            time.sleep(0.02)
        kill_all(processes_of(run_dir, variable, exclude=exclude))
    for path in segments:
        path.unlink(missing_ok=True)
    shutil.rmtree(run_dir, ignore_errors=True)
    return killed


def _started_ns(run_dir: Path) -> int:
    """When the run began, in ns since 1970; a run without an `owner` file begins now."""
    try:
        return (run_dir / "owner").stat().st_mtime_ns
    except OSError:
        return time.time_ns()


def _open_segments(pids: list[int], since_ns: int) -> set[Path]:
    """Shared-memory segments made since then that only these processes map.

    A killed process cannot unlink what it created (vLLM's message queues, for example). Other files
    under /dev/shm are their users' own, a checkpoint kept there for example: those are older than
    the run, or in a folder, where no segment can be.
    """
    mine = _mapped(pids)
    others = _mapped([int(p) for p in os.listdir("/proc") if p.isdigit() and int(p) not in pids])
    return {path for path in mine - others if _is_segment(path, since_ns)}


def _is_segment(path: Path, since_ns: int) -> bool:
    try:
        return path.parent == _SHM and path.stat().st_ctime_ns >= since_ns
    except OSError:
        return False  # gone already


def _mapped(pids: list[int]) -> set[Path]:
    found = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:
            continue
        found |= {Path(path) for path in re.findall(r"(/dev/shm/\S+)$", maps, re.MULTILINE)}
    return found


def own(run_dir: Path) -> IO[bytes]:
    """Mark a run as alive for as long as this process keeps the returned file open.

    The mark is a lock: a process id would mean another process, or none, to another container that
    shares the directory.
    """
    partial = run_dir / "owner.partial"
    file = partial.open("wb")
    fcntl.flock(file, fcntl.LOCK_EX)
    file.write(str(os.getpid()).encode())
    file.flush()
    partial.rename(run_dir / "owner")  # which is never there without the lock
    return file


def remove_stale_runs(parent: Path, prefix: str) -> list[Path]:
    """Remove this user's run directories that no process owns any more."""
    removed = []
    for owner in parent.glob(f"{prefix}*/owner"):
        run_dir = owner.parent
        try:
            if run_dir.stat().st_uid != os.getuid():
                continue
            with owner.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # owned, or gone meanwhile
        shutil.rmtree(run_dir, ignore_errors=True)
        removed.append(run_dir)
    return removed
