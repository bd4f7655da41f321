"""The persistent kernel compiles for Hopper without a GPU, and its mainloop keeps its sums in
registers.
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from vllm_expertplex.moe_server.apk import jit

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


def disassemble(cubin: Path) -> list[str]:
    tool = shutil.which("nvdisasm")
    if tool is None:
        pytest.skip("nvdisasm not found: pip install nvidia-cuda-nvdisasm, and put it on PATH")
    out = subprocess.run(
        [tool, "-c", str(cubin)], capture_output=True, text=True, check=True
    ).stdout
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]+)", out)


@pytest.mark.slow  # minutes of compiling
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_mainloop_uses_tensor_cores_and_no_local_memory(
    shape: jit.KernelShape, tmp_path: Path
) -> None:
    tools = toolchain()
    cubin = tmp_path / "kernel.cubin"
    jit.build_kernel(shape, cubin, tools)
    code = disassemble(cubin)
    multiply = "HGMMA" if shape.bf16 else "QGMMA"
    wide = [n for n, op in enumerate(code) if op.startswith(f"{multiply}.64x192")]
    assert len(wide) >= 8
    assert sum(op.startswith("USETMAXREG") for op in code) == 2
    assert any(op.startswith("UTMALDG") and "MULTICAST" in op for op in code)
    # Between the multiplications of one K block and those of the next lies the whole loop body.
    inside = [op for a, b in itertools.pairwise(wide) if b - a < 400 for op in code[a:b]]
    assert not [op for op in inside if op.startswith(("LDL", "STL", "MEMBAR", "ERRBAR"))]


@pytest.mark.parametrize(
    ("field", "value"), [("hidden", 100), ("intermediate", 0), ("experts", 257), ("top_k", 17)]
)
def test_a_shape_the_kernel_cannot_hold_is_refused_by_value(field: str, value: int) -> None:
    good = {"hidden": 1024, "intermediate": 512, "experts": 8, "top_k": 2}
    with pytest.raises(ValueError, match=str(value)):
        jit.KernelShape(**{**good, field: value})


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
