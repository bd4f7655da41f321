"""Whatever ends a run, and however, nothing of it is left, and nothing else is touched."""

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_expertplex.config import ENV_RUN_DIR
from vllm_expertplex.serve import cleanup, guardian
from vllm_expertplex.serve.run import run_directory

SHM = Path("/dev/shm")

# A serve process in miniature: a spawned child with Python shared memory, which starts a resource
# tracker, and a grandchild that only inherits the environment. It prints what it made.
SERVE = textwrap.dedent(
    """
    import multiprocessing, subprocess, sys, time
    from multiprocessing.shared_memory import SharedMemory
    from vllm_expertplex.serve.run import run_directory

    def child(pipe):
        memory = SharedMemory(create=True, size=4096)
        sleeper = subprocess.Popen(["sleep", "100"])
        pipe.send((memory.name, sleeper.pid))
        time.sleep(100)

    if __name__ == "__main__":
        with run_directory() as run_dir:
            (run_dir / "slot").write_bytes(bytes(4096))
            here, there = multiprocessing.get_context("spawn").Pipe()
            process = multiprocessing.get_context("spawn").Process(target=child, args=(there,))
            process.start()
            name, sleeper = here.recv()
            print(run_dir, name, process.pid, sleeper, flush=True)
            if sys.argv[1] == "wait":
                time.sleep(100)
    """
)


def gone(pid: int) -> bool:
    return not cleanup._alive(pid)


def until(condition: Callable[[], bool], seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


class Serve:
    """The miniature serve process, and what it said it made."""

    def __init__(self, script: Path, mode: str) -> None:
        script.write_text(SERVE)
        self.process = subprocess.Popen(
            [sys.executable, str(script), mode],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        run_dir, segment, child, grandchild = self.process.stdout.readline().split()
        self.run_dir, self.segment = Path(run_dir), SHM / segment
        self.pids = [int(child), int(grandchild)]

    def left(self) -> list[str]:
        """What is still there of it."""
        paths = [str(p) for p in (self.run_dir, self.segment) if p.exists()]
        pids = [str(pid) for pid in self.pids if not gone(pid)]
        members = cleanup.processes_of(self.run_dir, ENV_RUN_DIR, exclude=set())
        return paths + pids + [str(pid) for pid in members]


@pytest.fixture
def sleepers() -> Iterator[Callable[..., "subprocess.Popen[bytes]"]]:
    """Starts processes that do nothing, and ends them."""
    started: list[subprocess.Popen[bytes]] = []

    def start(**environment: str) -> "subprocess.Popen[bytes]":
        started.append(subprocess.Popen(["sleep", "100"], env=environment, executable="/bin/sleep"))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_killed_serve_process_leaves_nothing(tmp_path: Path) -> None:
    serve = Serve(tmp_path / "serve.py", "wait")
    assert serve.segment.exists()
    assert oct(serve.run_dir.stat().st_mode & 0o777) == "0o700"
    serve.process.kill()
    serve.process.wait()
    assert until(lambda: not serve.left()), serve.left()


def test_normal_end_leaves_nothing_and_is_quick_and_quiet(tmp_path: Path) -> None:
    serve = Serve(tmp_path / "serve.py", "return")
    begin = time.monotonic()
    _, errors = serve.process.communicate(timeout=30)
    took = time.monotonic() - begin
    assert serve.process.returncode == 0, errors
    assert until(lambda: not serve.left()), serve.left()
    # Its own resource tracker lives as long as it does: waiting for that one, or killing it, would
    # cost seconds and a warning.
    assert "relaunching" not in errors
    assert took < 1.9


def test_a_killed_guardian_is_not_missed(tmp_path: Path) -> None:
    with run_directory() as run_dir:
        assert os.environ[ENV_RUN_DIR] == str(run_dir)
        # A process has no command line yet in the first moments of its program.
        assert until(lambda: len(children_named("guardian.py")) == 1)
        (watcher,) = children_named("guardian.py")
        os.kill(watcher, signal.SIGKILL)
    assert not run_dir.exists()
    assert ENV_RUN_DIR not in os.environ


def children_named(name: str, parent: int | None = None) -> list[int]:
    found = []
    parent = parent or os.getpid()
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        with contextlib.suppress(OSError):
            if name.encode() in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found


def test_error_in_the_run_cleans_up_too() -> None:
    with pytest.raises(KeyError), run_directory() as run_dir:
        raise KeyError
    assert not run_dir.exists()
    assert not children_named("guardian.py")


def test_only_processes_of_this_run_are_killed(
    tmp_path: Path, sleepers: Callable[..., "subprocess.Popen[bytes]"]
) -> None:
    mine, other = tmp_path / "run-1", tmp_path / "run-11"
    mine.mkdir()
    ours = sleepers(**{ENV_RUN_DIR: str(mine)})
    spared = [sleepers(**{ENV_RUN_DIR: str(other)}), sleepers(), sleepers(X=str(mine))]
    excluded = sleepers(**{ENV_RUN_DIR: str(mine)})
    assert until(lambda: len(cleanup.processes_of(mine, ENV_RUN_DIR, exclude=set())) == 2)
    assert cleanup.end_run(mine, ENV_RUN_DIR, exclude={excluded.pid}) == [ours.pid]
    assert gone(ours.pid)
    assert all(not gone(p.pid) for p in [*spared, excluded])
    assert not mine.exists()


# Maps the files given as arguments and stays.
MAPPER = """
import mmap, sys, time
files = [open(path, "r+b") for path in sys.argv[1:]]
maps = [mmap.mmap(file.fileno(), 0) for file in files]
print("ready", flush=True)
time.sleep(100)
"""


@pytest.fixture
def segment() -> Iterator[Callable[..., Path]]:
    """Makes files under /dev/shm, and removes what is left of them."""
    made: list[Path] = []

    def make(folder: str = "") -> Path:
        path = SHM / folder / f"expertplextest-{uuid.uuid4().hex}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(mmap.PAGESIZE))
        made.append(path)
        return path

    yield make
    for path in made:
        path.unlink(missing_ok=True)
        if path.parent != SHM:
            path.parent.rmdir()


def mapper(run_dir: Path | None, *paths: Path) -> "subprocess.Popen[bytes]":
    """A process that maps `paths`, of the run `run_dir` if there is one."""
    environment = {} if run_dir is None else {ENV_RUN_DIR: str(run_dir)}
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", MAPPER, *map(str, paths)],
        stdout=subprocess.PIPE,
        env=environment,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def test_segments_of_killed_processes_go_and_no_other_file(
    tmp_path: Path, segment: Callable[..., Path]
) -> None:
    before = segment()  # a user's file that only servers map, such as a checkpoint in /dev/shm
    time.sleep(0.05)  # file times are as coarse as the kernel's clock tick
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "owner").write_text("1 1")
    leaked, shared, untouched = segment(), segment(), segment()
    checkpoint = segment(f"expertplextest-{uuid.uuid4().hex}")  # copied there during the start
    server = mapper(run_dir, before, leaked, shared, checkpoint)
    stranger = mapper(None, shared)
    try:
        assert cleanup.end_run(run_dir, ENV_RUN_DIR, exclude=set()) == [server.pid]
        assert not leaked.exists()
        for kept in (before, shared, untouched, checkpoint):
            assert kept.exists()
    finally:
        for process in (server, stranger):
            process.kill()
            process.wait()


def test_stale_runs_are_removed_and_live_ones_kept(tmp_path: Path) -> None:
    def run(name: str) -> Path:
        path = tmp_path / name
        path.mkdir()
        return path

    live, starting, foreign = (
        run(f"{name}-1") for name in ("expertplex", "expertplex-new", "other")
    )
    stale = {run("expertplex-killed"), run("expertplex-reused-pid")}
    for path in (foreign, *stale):
        (path / "owner").write_text(str(os.getpid()))
    (tmp_path / "expertplex-file").write_text("")
    with cleanup.own(live):
        # As another container with the same /dev/shm sees it: no such process.
        (live / "owner").write_text("4194305")
        assert set(cleanup.remove_stale_runs(tmp_path, "expertplex-")) == stale
        assert all(not path.exists() for path in stale)
        assert all(path.exists() for path in (live, starting, foreign))
    assert cleanup.remove_stale_runs(tmp_path, "expertplex-") == [live]


def test_a_run_is_live_to_others_until_its_process_is_gone(tmp_path: Path) -> None:
    serve = Serve(tmp_path / "serve.py", "wait")
    name = serve.run_dir.name
    assert cleanup.remove_stale_runs(SHM, name) == []
    (watcher,) = children_named("guardian.py", serve.process.pid)
    for pid in (watcher, serve.process.pid):
        os.kill(pid, signal.SIGKILL)
    serve.process.wait()
    try:
        assert cleanup.remove_stale_runs(SHM, name) == [serve.run_dir]
    finally:
        cleanup.kill_all(serve.pids)
        serve.segment.unlink(missing_ok=True)


def ignored(pid: int) -> int:
    """The signals a process ignores, as a bit mask."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("SigIgn:")[2].split()[0], 16)


def test_guardian_waits_for_its_parent_and_ignores_signals(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    process = guardian.start(run_dir, ENV_RUN_DIR)
    assert until(lambda: bool(Path(f"/proc/{process.pid}/cmdline").read_bytes()))
    assert cleanup.processes_of(run_dir, ENV_RUN_DIR, exclude=set()) == []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    assert until(lambda: all(ignored(process.pid) >> (n - 1) & 1 for n in numbers))
    for number in numbers:
        process.send_signal(number)
    time.sleep(0.2)
    assert process.poll() is None
    assert run_dir.exists()
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=15) == 0
    assert not run_dir.exists()
