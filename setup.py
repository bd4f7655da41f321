"""Builds the native modules: `_comm` (one-sided data path) and `_scheduler` (tile scheduler).

Only a C++20 compiler and the `nanobind` package are needed: nothing here uses torch or CUDA.
"""

import sysconfig
from pathlib import Path

import nanobind
from setuptools import Extension, setup

NANOBIND = Path(nanobind.__file__).parent
INCLUDE = [
    str(NANOBIND / "include"),
    str(NANOBIND / "ext" / "robin_map" / "include"),
    sysconfig.get_path("include"),
]
FLAGS = ["-std=c++20", "-O3", "-fvisibility=hidden", "-fno-strict-aliasing", "-pthread"]
MODULES = {"_comm": "csrc/comm/module.cpp", "_scheduler": "csrc/cpu/scheduler_module.cpp"}

# nanobind's own code, compiled once for all modules.
runtime = {
    "sources": ["csrc/nanobind.cpp"],
    "include_dirs": [str(NANOBIND / "src"), *INCLUDE],
    "cflags": FLAGS,
}


def native(name: str, source: str) -> Extension:
    """One nanobind extension of the package."""
    return Extension(
        f"vllm_expertplex.{name}",
        sources=[source],
        include_dirs=["csrc", *INCLUDE],
        libraries=["nanobind"],
        depends=[str(header) for header in Path("csrc").rglob("*.h")],
        extra_compile_args=[*FLAGS, "-Wall", "-Wextra"],
        extra_link_args=["-pthread"],
        language="c++",
    )


setup(
    libraries=[("nanobind", runtime)],
    ext_modules=[native(name, source) for name, source in MODULES.items()],
)
