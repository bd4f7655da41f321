"""The guardian: a small process that cleans up when the serve process is killed.

Owns: noticing the death of its parent, whatever the cause. Must not know: anything else.
Standard library only. Run as `python guardian.py RUN_DIR VARIABLE` with its standard input a pipe
whose other end the serve process holds open.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path


def start(run_dir: Path, variable: str) -> "subprocess.Popen[bytes]":
    """Start a guardian for `run_dir`; it acts when this process ends."""
    return subprocess.Popen(
        [sys.executable, "-S", "-E", __file__, str(run_dir), variable],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        # Without the mark that would make it a process of the run; with all that Python may need.
        env={name: value for name, value in os.environ.items() if name != variable},
        start_new_session=True,  # a Ctrl-C in the terminal must not reach it
    )


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    import cleanup  # type: ignore[import-not-found]

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    run_dir, variable = Path(sys.argv[1]), sys.argv[2]
    sys.stdin.buffer.read()  # until the serve process is gone
    if run_dir.exists():
        cleanup.end_run(run_dir, variable, exclude={os.getpid()})


if __name__ == "__main__":
    main()
