"""FP8 block quantization: the twin is exact, the error is what e4m3 allows."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from vllm_expertplex.checkpoints.fp8 import quantize, write_fp8_pair
from vllm_expertplex.checkpoints.tiny import make_tiny
from vllm_expertplex.quantization import dequantise


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 3),
    columns=st.integers(1, 3),
    magnitude=st.floats(1e-4, 1e3),
)
def test_dequantized_values_are_exact_in_bf16_and_near(
    seed: int, rows: int, columns: int, magnitude: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows * 128, columns * 128, generator=generator) * magnitude
    quantized, scale = quantize(weight)
    assert scale.shape == (rows, columns)
    exact = dequantise(quantized, scale).double()
    assert torch.equal(dequantise(quantized, scale).to(torch.bfloat16).double(), exact)
    # Half a step of a four-bit significand, or half a subnormal step (2**-10) of the block's scale.
    bound = torch.maximum(weight.abs() / 16, scale.amax() * 2**-10).double()
    assert ((exact - weight).abs() <= bound).all()


def test_a_zero_block_stays_zero() -> None:
    quantized, scale = quantize(torch.zeros(128, 128))
    assert scale.isfinite().all()
    assert not dequantise(quantized, scale).any()


def test_odd_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"130x128.*multiples of 128"):
        quantize(torch.zeros(130, 128))


def test_pair_holds_the_same_model(tmp_path: Path) -> None:
    source, fp8, twin = tmp_path / "source", tmp_path / "fp8", tmp_path / "twin"
    make_tiny(source, "minimax-m2")
    write_fp8_pair(source, fp8, twin)
    original = load_file(source / "model.safetensors")
    quantized, dequantized = (load_file(f / "model.safetensors") for f in (fp8, twin))
    assert dequantized.keys() == original.keys()
    for name, weight in dequantized.items():
        assert weight.dtype == original[name].dtype
        if (scale := quantized.get(f"{name}_scale_inv")) is None:
            assert torch.equal(quantized[name], original[name])
            assert torch.equal(weight, original[name])
        else:
            assert torch.equal(dequantise(quantized[name], scale).to(weight.dtype), weight)
    converted = {name for name in quantized if name.endswith("_scale_inv")}
    assert len(converted) == 4 * (4 + 16 * 3)  # layers x (attention projections + experts)
    config = json.loads((fp8 / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert "quantization_config" not in json.loads((twin / "config.json").read_text())
