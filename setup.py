"""Builds the native modules: `_comm` (one-sided data path) and `_scheduler` (tile scheduler).

Only a C++20 compiler and the `nanobind` package are needed: nothing here links to torch or CUDA.
Where torch is installed, one file is compiled against its vector headers; without it, the CPU
backend rounds some activations differently from vLLM.
"""

import platform
import sys
import sysconfig
from importlib.util import find_spec
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
libraries = [("nanobind", runtime)]
macros: list[tuple[str, str | None]] = []

# `exp_u20` of torch's AVX-512 vectors, in a library of its own because of its compiler flags.
torch = find_spec("torch")
if torch and torch.origin and platform.machine() in ("x86_64", "AMD64"):
    macros = [("XP_TORCH_VECTORS", None)]
    vectors = {
        "sources": ["csrc/cpu/silu_avx512.cpp"],
        "include_dirs": ["csrc"],
        "macros": [*macros, ("CPU_CAPABILITY", "AVX512"), ("CPU_CAPABILITY_AVX512", None)],
        "cflags": [
            *FLAGS,
            *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
            # Neither torch's headers nor GCC's intrinsics are free of warnings.
            *("-isystem", str(Path(torch.origin).parent / "include"), "-Wno-maybe-uninitialized"),
        ],
    }
    libraries.append(("silu_avx512", vectors))
else:
    print("no torch here: built without its AVX-512 exponential", file=sys.stderr)


def native(name: str, source: str) -> Extension:
    """One nanobind extension of the package."""
    return Extension(
        f"vllm_expertplex.{name}",
        sources=[source],
        include_dirs=["csrc", *INCLUDE],
        define_macros=macros,
        libraries=[library for library, _ in libraries],
        depends=[str(header) for header in Path("csrc").rglob("*.h")],
        extra_compile_args=[*FLAGS, "-Wall", "-Wextra"],
        extra_link_args=["-pthread"],
        language="c++",
    )


setup(
    libraries=libraries,
    ext_modules=[native(name, source) for name, source in MODULES.items()],
)
