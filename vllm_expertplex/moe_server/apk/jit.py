"""Builds the kernel for one model's shapes, and keeps the result.

Needs `nvcc` (CUDA 12.9 or newer) and the header package `sgl-deep-gemm` (DeepGEMM and CUTLASS
headers), but no GPU.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import math
import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

import msgspec

from vllm_expertplex.cuda import nvcc
from vllm_expertplex.moe_server.apk.structs import MAX_TOKENS

HEADER_PACKAGE = "sgl-deep-gemm"
_SUPPRESSED = "39,161,174,177,186,940"  # diagnostics inside the packaged headers
_FLAGS = [
    *nvcc.FLAGS,
    "--expt-relaxed-constexpr",
    f"--diag-suppress={_SUPPRESSED}",
    "--ptxas-options=--register-usage-level=10,-v",
]
UNROLLS = (4, 2)  # of the mainloop, the preferred first
# Bytes by which spills outside the mainloop differ from one build to another; sums that are spilled
# in it are hundreds.
_ELSEWHERE = 64
# Of the gather, as in `csrc/apk/operation.cuh`: warps over which slices of tokens are spread,
# columns of a slice, slices a warp takes at most.
_GATHER_WARPS, _GATHER_COLUMNS, _GATHER_SLICES = 66 * 16, 256, 6


class KernelShape(msgspec.Struct, frozen=True):
    """What the kernel is compiled for. `hidden` and `intermediate`: elements, multiples of 128."""

    hidden: int
    intermediate: int
    experts: int  # on this GPU, 1-256
    top_k: int  # 1-16
    bf16: bool = False  # bf16 weights and activations instead of block-scaled FP8
    multicast: int = 2  # weights: 0 each CTA loads all, 1 rank 0 sends, 2 each sends half
    claim_ahead: int = 6  # K blocks still to load when the next tile is claimed
    raster: int = 8  # row-block pairs walked before the next column block
    decode_n: int = 128  # columns per warpgroup where an expert has at most 64 rows: 64 or 128

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate"):
            size = getattr(self, name)
            if size <= 0 or size % 128:
                raise ValueError(f"{name} size {size} is not a positive multiple of 128")
        if not 1 <= self.experts <= 256:
            raise ValueError(f"{self.experts} experts on one GPU; the kernel holds 1 to 256")
        if not 1 <= self.top_k <= 16:
            raise ValueError(f"top-k {self.top_k}; the kernel takes 1 to 16")

    @property
    def most_tokens(self) -> int:
        """Of an operation. A warp of the gather (`csrc/apk/rows.cuh`) keeps what it needs of each
        of its tokens in `top_k` of its 32 lanes. Where a token has few slices, a warp's share of a
        large operation may be of more tokens than that has room for, which would get sums of other
        tokens' rows. Hidden sizes above 768 have no such limit.
        """
        in_token = -(-self.hidden // _GATHER_COLUMNS)  # slices
        for each in range(1, _GATHER_SLICES + 1):
            # A warp begins at a multiple of `each`, so at most so many slices into a token:
            into = in_token - math.gcd(each, in_token)
            tokens = -(-(into + each) // in_token)
            if tokens > 32 // self.top_k:
                return _GATHER_WARPS * (each - 1) // in_token  # the most of which it takes fewer
        return MAX_TOKENS

    def check_tokens(self, tokens: int) -> None:
        """Raises ValueError for operations of more than `most_tokens`."""
        if tokens > self.most_tokens:
            raise ValueError(
                f"operations of {tokens} tokens with hidden size {self.hidden} and top-k "
                f"{self.top_k}: the persistent kernel computes at most {self.most_tokens} tokens "
                "at once of such; lower --max-num-batched-tokens"
            )

    def defines(self, unroll: int) -> list[str]:
        values = {
            "HIDDEN": self.hidden,
            "INTERMEDIATE": self.intermediate,
            "EXPERTS": self.experts,
            "TOP_K": self.top_k,
            "MULTICAST": self.multicast,
            "CLAIM_AHEAD": self.claim_ahead,
            "RASTER": self.raster,
            "DECODE_N": self.decode_n,
            "UNROLL": unroll,
        }
        return [f"-DAPK_{k}={v}" for k, v in values.items()] + (["-DAPK_BF16"] if self.bf16 else [])


class Toolchain(msgspec.Struct, frozen=True):
    """A compiler and the headers it is given."""

    nvcc: str
    include: Path
    version: str  # of both, part of the cache key

    @staticmethod
    def find() -> Toolchain:
        """Raises RuntimeError naming what is missing and how to get it."""
        compiler = nvcc.find_nvcc()
        # Located, not imported: its binary is not needed.
        spec = importlib.util.find_spec("deep_gemm")
        if spec is None or not spec.submodule_search_locations:
            raise RuntimeError(f"DeepGEMM's headers not found: pip install {HEADER_PACKAGE}")
        include = Path(spec.submodule_search_locations[0]) / "include"
        output = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, check=True
        ).stdout
        headers = importlib.metadata.version(HEADER_PACKAGE)
        return Toolchain(compiler, include, f"{output.splitlines()[-1]} {headers}")


def cache_dir() -> Path:
    return nvcc.cache_dir("apk")


def cache_key(shape: KernelShape, version: str) -> str:
    """Covers everything that decides the result: sources, flags, shapes, compiler, headers."""
    digest = hashlib.sha256()
    sources = nvcc.csrc()
    for path in sorted([*sources.glob("apk/*.cu*"), *sources.glob("scheduler/*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    choice = f"{UNROLLS} {_ELSEWHERE}"
    digest.update("\0".join([*_FLAGS, *shape.defines(0), choice, version]).encode())
    return digest.hexdigest()[:24]


def spilled_bytes(report: str) -> int:
    """Bytes that ptxas' report says the main kernel stores to local memory for want of
    registers.
    """
    found = re.search(
        r"properties for expertplex_apk\n.*?(\d+) bytes spill stores", report, re.DOTALL
    )
    if found is None:
        raise RuntimeError(
            f"no resource usage of expertplex_apk in the compiler's report:\n{report}"
        )
    return int(found[1])


def compile_kernel(shape: KernelShape, out: Path, unroll: int, tools: Toolchain) -> str:
    """Compiles to the cubin `out`; returns ptxas' report. Raises RuntimeError with the compiler's
    output.
    """
    command = [
        tools.nvcc,
        *_FLAGS,
        *shape.defines(unroll),
        f"-I{tools.include}",
        f"-I{nvcc.csrc()}",
        str(nvcc.csrc() / "apk" / "kernel.cu"),
        "-o",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvcc failed on the persistent kernel, {shape}:\n{done.stderr[-4000:]}")
    return done.stderr


def build_kernel(shape: KernelShape, out: Path, tools: Toolchain) -> int:
    """Builds both unrollings of the mainloop and keeps the first that does not spill in it.

    The mainloop needs nearly all registers there are, and which unrolling fits differs by shape.
    Returns the bytes spilled.
    """
    with ThreadPoolExecutor(len(UNROLLS)) as pool:
        paths = [out.with_suffix(f".{u}") for u in UNROLLS]
        reports = pool.map(compile_kernel, repeat(shape), paths, UNROLLS, repeat(tools))
        spills = [spilled_bytes(report) for report in reports]
    best = next(i for i, n in enumerate(spills) if n <= min(spills) + _ELSEWHERE)
    paths[best].replace(out)
    return spills[best]


def kernel_path(shape: KernelShape) -> Path:
    """The cubin for `shape`, compiled now if it is not in the cache (about 6 s)."""
    tools = Toolchain.find()
    path = cache_dir() / f"{cache_key(shape, tools.version)}.cubin"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            built = Path(scratch) / "kernel.cubin"
            build_kernel(shape, built, tools)
            built.replace(path)  # atomic: several servers may start at once
    return path
