"""Kernels are compiled once, from exactly their sources, and errors show the compiler's words."""

import os
from pathlib import Path

import pytest

from vllm_expertplex.cuda import nvcc


@pytest.fixture(autouse=True)
def _scratch_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def _compiler() -> None:
    try:
        nvcc.find_nvcc()
    except RuntimeError as missing:
        pytest.skip(str(missing))


def kernel(folder: Path, body: str) -> Path:
    source = folder / "kernel.cu"
    source.write_text(f'extern "C" __global__ void kernel(int* out) {{ {body} }}\n')
    return source


@pytest.mark.usefixtures("_compiler")
def test_the_attention_kernels_compile_and_are_kept() -> None:
    folder = nvcc.csrc() / "attention"
    first = nvcc.cubin(folder / "kernels.cu", list(folder.glob("*.cuh")))
    code = first.read_bytes()
    for name in ("dispatch_fp8", "dispatch_bf16_small", "wait_done", "wait_and_combine"):
        assert f"expertplex_{name}".encode() in code
    before = os.stat(first).st_mtime_ns
    again = nvcc.cubin(folder / "kernels.cu", list(folder.glob("*.cuh")))
    assert (again, os.stat(again).st_mtime_ns) == (first, before)


@pytest.mark.usefixtures("_compiler")
def test_a_changed_source_header_or_flag_is_another_kernel(tmp_path: Path) -> None:
    header = tmp_path / "value.cuh"
    header.write_text("constexpr int kValue = 1;\n")
    source = kernel(tmp_path, "*out = 1;")
    built = {nvcc.cubin(source, [header])}
    header.write_text("constexpr int kValue = 2;\n")
    built.add(nvcc.cubin(source, [header]))
    built.add(nvcc.cubin(source, [header], ["-DVALUE=3"]))
    built.add(nvcc.cubin(kernel(tmp_path, "*out = 2;"), [header]))
    assert len(built) == 4


@pytest.mark.usefixtures("_compiler")
def test_a_compiler_error_is_shown(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r'kernel\.cu(.|\n)*"missing" is undefined'):
        nvcc.cubin(kernel(tmp_path, "*out = missing;"), [])


def test_a_missing_compiler_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvcc.shutil, "which", lambda *_, **__: None)
    with pytest.raises(RuntimeError, match="install the CUDA toolkit"):
        nvcc.find_nvcc()
