"""NVIDIA's Multi-Process Service for one run: servers that share a GPU run on it at once.

Owns: starting its daemon. Must not know: which servers use it.

The daemon and the server process it starts inherit the run's environment, by which clean-up finds
and ends them like any other process of the run.
"""

import os
import shutil
import subprocess
from pathlib import Path

from vllm_expertplex.serve.placement import mps_pipes

CONTROL = "nvidia-cuda-mps-control"
_START_S = 30.0


def start(run_dir: Path) -> None:
    """Start a daemon whose clients find it in `mps_pipes(run_dir)`.

    Raises RuntimeError where there is none, or it does not start.
    """
    control = shutil.which(CONTROL)
    if control is None:
        raise RuntimeError(
            f"{CONTROL} not found: servers share a GPU through it. It comes with the NVIDIA "
            "driver; or use a GPU per server, see --expertplex-layout"
        )
    pipes, logs = mps_pipes(run_dir), run_dir / "mps-log"
    pipes.mkdir()
    logs.mkdir()
    environment = {
        **os.environ,
        "CUDA_MPS_PIPE_DIRECTORY": str(pipes),
        "CUDA_MPS_LOG_DIRECTORY": str(logs),
    }
    # A daemon that sees some GPUs only numbers those anew, and places name them as they are.
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        started = subprocess.run(
            [control, "-d"], env=environment, capture_output=True, text=True, timeout=_START_S
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(
            f"{control} -d has not ended after {_START_S:g} s; see nvidia-smi and dmesg"
        ) from None
    if started.returncode:
        raise RuntimeError(f"{control} -d failed: {(started.stdout + started.stderr).strip()}")
