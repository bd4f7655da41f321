"""Builds the native modules: `_comm` (one-sided shared-memory path) and `_scheduler` (tile scheduler).

Only a C++20 compiler and the `nanobind` package are needed; nothing here depends on torch or CUDA.
"""

import os
from pathlib import Path

import nanobind
from setuptools import Extension, setup

NANOBIND = Path(nanobind.__file__).parent


def native(name: str, sources: list[str]) -> Extension:
    """One nanobind extension; nanobind's own sources are compiled in, as its documentation allows."""
    return Extension(
        f"vllm_expertplex.{name}",
        sources=[*sources, os.path.relpath(NANOBIND / "src" / "nb_combined.cpp")],
        include_dirs=[
            "csrc",
            str(NANOBIND / "include"),
            str(NANOBIND / "ext" / "robin_map" / "include"),
        ],
        depends=[str(p) for p in Path("csrc").rglob("*.h")],
        extra_compile_args=[
            "-std=c++20", "-O3", "-Wall", "-Wextra", "-fvisibility=hidden", "-pthread",
            "-fno-strict-aliasing",
        ],
        extra_link_args=["-pthread"],
        language="c++",
    )


MODULES = {"_comm": "csrc/comm/module.cpp", "_scheduler": "csrc/cpu/scheduler_module.cpp"}
setup(ext_modules=[native(name, [src]) for name, src in MODULES.items() if Path(src).exists()])
