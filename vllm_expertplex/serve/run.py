"""The run directory of one `vllm serve`, and what must happen when the command ends.

Owns: creating the directory, the guardian, and the environment that marks our processes.
Must not know: roles, vLLM.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_expertplex.config import ENV_RUN_DIR
from vllm_expertplex.serve import cleanup, guardian

_PREFIX = "expertplex-"
# All name the directory. vLLM's sockets, the rendezvous files of its process groups and whatever
# else is temporary go there too, and so disappear with it even when nobody cleans up.
_VARIABLES = (ENV_RUN_DIR, "VLLM_RPC_BASE_PATH", "TMPDIR")


def _parent() -> Path:
    """Memory-backed where there is such a place: the slots live here."""
    shm = Path("/dev/shm")
    return shm if os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


@contextmanager
def run_directory() -> Iterator[Path]:
    """An owner-only directory for this run; when it ends, nothing of the run is left."""
    parent = _parent()
    cleanup.remove_stale_runs(parent, _PREFIX)
    run_dir = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))  # mode 0700
    before = {name: os.environ.get(name) for name in _VARIABLES}
    owner = watcher = None
    try:  # a signal may come at any time from here on
        owner = cleanup.own(run_dir)
        os.environ |= {name: str(run_dir) for name in _VARIABLES}
        tempfile.tempdir = str(run_dir)
        watcher = guardian.start(run_dir, ENV_RUN_DIR)
        yield run_dir
    finally:
        cleanup.end_run(run_dir, ENV_RUN_DIR, exclude={os.getpid()}, trackers=False)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        tempfile.tempdir = None
        if owner is not None:
            owner.close()
        if watcher is not None:
            assert watcher.stdin is not None
            watcher.stdin.close()
            watcher.wait(timeout=10)
