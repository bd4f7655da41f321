"""The persistent kernel compiles for Hopper without a GPU, and its loops are as they were meant."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_expertplex.moe_server.apk import jit, structs

SHAPES = {
    "MiniMax-M2": jit.KernelShape(3072, 1536, 64, 8),
    "GLM": jit.KernelShape(6144, 2048, 16, 8),
    "uneven K blocks, bf16": jit.KernelShape(1024, 384, 8, 4, bf16=True),
}


def toolchain() -> jit.Toolchain:
    try:
        return jit.Toolchain.find()
    except RuntimeError as missing:
        pytest.skip(str(missing))


class Instruction(NamedTuple):
    name: str
    operands: str


def disassemble(cubin: Path) -> list[Instruction]:
    tool = shutil.which("nvdisasm")
    if tool is None:
        pytest.skip("nvdisasm not found: pip install nvidia-cuda-nvdisasm, and put it on PATH")
    out = subprocess.run(
        [tool, "-c", str(cubin)], capture_output=True, text=True, check=True
    ).stdout
    found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]+)([^;]*);", out)
    return [Instruction(*f) for f in found]


def check_mainloop(code: list[Instruction], multiply: str) -> None:
    """Its sums stay in registers, and it looks for the next K block before it scales this one."""
    wide = [n for n, i in enumerate(code) if i.name.startswith(f"{multiply}.64x192")]
    assert len(wide) >= 8
    # Between the multiplications of one K block and those of the next lies the whole loop body.
    bodies = [code[a:b] for a, b in itertools.pairwise(wide) if b - a < 400]
    assert not [
        i for body in bodies for i in body if i.name.startswith(("LDL", "STL", "MEMBAR", "ERRBAR"))
    ]
    for body in bodies:
        scaled = [n for n, i in enumerate(body) if i.name.startswith("FFMA")]
        looked = [n for n, i in enumerate(body) if i.name.startswith("SYNCS.PHASECHK")]
        assert not scaled or min(looked) < scaled[-10]


def check_loads(code: list[Instruction]) -> None:
    """No 16-byte load of a row stage waits for the one before, of the same unit."""
    loads = [n for n, i in enumerate(code) if i.name.startswith("LDG.E.128")]
    near = [(a, b) for a, b in itertools.pairwise(loads) if b - a < 20]
    assert len(near) >= 12
    for a, b in near:
        first = int(re.search(r"R(\d+)", code[a].operands)[1])  # type: ignore[index]
        loaded = re.compile("|".join(rf"\bR{first + n}\b" for n in range(4)))
        between = [i.operands.partition(",")[2] for i in code[a + 1 : b]]
        assert not [o for o in between if loaded.search(o)]


@pytest.mark.slow  # minutes of compiling
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_machine_code_is_what_was_meant(shape: jit.KernelShape, tmp_path: Path) -> None:
    tools = toolchain()
    cubin = tmp_path / "kernel.cubin"
    jit.build_kernel(shape, cubin, tools)
    code = disassemble(cubin)
    assert sum(i.name.startswith("USETMAXREG") for i in code) == 2
    assert any(i.name.startswith("UTMALDG") and "MULTICAST" in i.name for i in code)
    check_mainloop(code, "HGMMA" if shape.bf16 else "QGMMA")
    check_loads(code)


@pytest.mark.parametrize(
    ("field", "value"), [("hidden", 100), ("intermediate", 0), ("experts", 257), ("top_k", 17)]
)
def test_a_shape_the_kernel_cannot_hold_is_refused_by_value(field: str, value: int) -> None:
    good = {"hidden": 1024, "intermediate": 512, "experts": 8, "top_k": 2}
    with pytest.raises(ValueError, match=str(value)):
        jit.KernelShape(**{**good, field: value})


def gather_fits(shape: jit.KernelShape, tokens: int) -> bool:
    """Whether each warp has lanes for its tokens; its slices as in `csrc/apk/rows.cuh`."""
    in_token = -(-shape.hidden // 256)
    slices = tokens * in_token
    each = min(6, -(-slices // (66 * 16)))
    first = np.arange(0, slices, each)
    last = np.minimum(first + each, slices) - 1
    return bool((last // in_token - first // in_token < 32 // shape.top_k).all())


@given(st.integers(1, 12), st.integers(1, 16), st.integers(1, 10_000))
def test_a_warp_of_the_gather_has_lanes_for_its_tokens(
    columns: int, top_k: int, tokens: int
) -> None:
    shape = jit.KernelShape(columns * 128, 128, 8, top_k)
    if tokens <= shape.most_tokens:
        assert gather_fits(shape, tokens)
    if shape.most_tokens < structs.MAX_TOKENS:
        assert not gather_fits(shape, shape.most_tokens + 1)


def test_more_tokens_than_the_kernel_can_gather_are_refused() -> None:
    small = jit.KernelShape(256, 128, 8, 8)
    small.check_tokens(4224)
    with pytest.raises(ValueError, match=r"4225 tokens.*size 256.*top-k 8.*at most 4224.*lower"):
        small.check_tokens(4225)
    jit.KernelShape(1024, 128, 8, 16).check_tokens(structs.MAX_TOKENS)


def test_the_cache_key_covers_shapes_and_compiler() -> None:
    shape = jit.KernelShape(1024, 512, 8, 2)
    keys = {
        jit.cache_key(shape, "13.0"),
        jit.cache_key(shape, "13.1"),
        jit.cache_key(jit.KernelShape(1024, 512, 8, 4), "13.0"),
        jit.cache_key(jit.KernelShape(1024, 512, 8, 2, bf16=True), "13.0"),
    }
    assert len(keys) == 4
    assert jit.cache_key(shape, "13.0") in keys


def test_a_missing_header_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit.nvcc, "find_nvcc", lambda: "/somewhere/nvcc")
    monkeypatch.setattr(jit.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="pip install sgl-deep-gemm"):
        jit.Toolchain.find()
