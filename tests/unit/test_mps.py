"""Starting NVIDIA's Multi-Process Service, with a stand-in for its daemon."""

from pathlib import Path

import pytest

from vllm_expertplex.serve import mps


def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    program = programs / "nvidia-cuda-mps-control"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")


def test_the_daemon_gets_folders_of_the_run_and_sees_all_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = (
        'echo "$1 $CUDA_MPS_PIPE_DIRECTORY $CUDA_MPS_LOG_DIRECTORY ${CUDA_VISIBLE_DEVICES-all}" '
        '> "$CUDA_MPS_LOG_DIRECTORY/t"'
    )
    daemon(tmp_path, monkeypatch, told)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    mps.start(tmp_path)
    pipes, logs = tmp_path / "mps", tmp_path / "mps-log"
    assert pipes.is_dir()
    assert (logs / "t").read_text() == f"-d {pipes} {logs} all\n"


def test_a_daemon_that_does_not_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon(tmp_path, monkeypatch, "echo no device >&2; exit 1")
    with pytest.raises(RuntimeError, match="-d failed: no device"):
        mps.start(tmp_path)


def test_a_daemon_that_hangs_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps, "_START_S", 0.2)
    daemon(tmp_path, monkeypatch, "exec sleep 20")
    with pytest.raises(RuntimeError, match=r"-d has not ended after 0\.2 s"):
        mps.start(tmp_path)


def test_a_missing_daemon_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="nvidia-cuda-mps-control not found"):
        mps.start(tmp_path)
