"""The reference backend against plain arithmetic in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_expertplex.layout import PHASE_DECODE, PHASE_PREFILL
from vllm_expertplex.moe_server.backend import ExpertWeights, Operation
from vllm_expertplex.moe_server.backend_torch import TorchBackend, dequantise
from vllm_expertplex.quantization import BLOCK


def plain_weights(experts: int, hidden: int, inner: int, dtype: torch.dtype) -> ExpertWeights:
    return ExpertWeights(
        (torch.randn(experts, 2 * inner, hidden) / hidden**0.5).to(dtype),
        (torch.randn(experts, hidden, inner) / inner**0.5).to(dtype),
    )


def operation(x: torch.Tensor, ids: torch.Tensor, done: list[int], **fields: int) -> Operation:
    out = torch.full((*ids.shape, x.shape[1]), float("nan"))
    source = fields.get("source", 0)
    return Operation(
        source,
        fields.get("phase", PHASE_DECODE),
        fields.get("layer", 0),
        x,
        ids,
        out,
        lambda: done.append(source),
    )


def reference(weights: ExpertWeights, op: Operation) -> torch.Tensor:
    """The rows in float64; NaN, which is what `out` held before, where the expert is elsewhere."""

    def values(stored: torch.Tensor, scale: torch.Tensor | None, slot: int) -> torch.Tensor:
        matrix = stored[slot].double()
        if scale is None:
            return matrix
        rows, columns = matrix.shape
        index_r, index_c = torch.arange(rows) // BLOCK, torch.arange(columns) // BLOCK
        return matrix * scale[slot].double()[index_r][:, index_c]

    out = torch.full(op.out.shape, float("nan"), dtype=torch.float64)
    for token in range(op.x.shape[0]):
        for k, slot in enumerate(op.topk_ids[token].tolist()):
            if slot >= 0:
                x = op.x[token].double()
                gate, up = (
                    values(half, scale, slot) @ x
                    for half, scale in zip(
                        weights.w13.chunk(2, dim=1),
                        [None] * 2 if weights.w13_scale is None else weights.w13_scale.chunk(2, 1),
                        strict=True,
                    )
                )
                inner = torch.nn.functional.silu(gate) * up
                w2 = values(weights.w2, weights.w2_scale, slot)
                out[token, k] = w2 @ inner
    return out


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 9),
    topk=st.integers(1, 4),
    experts=st.integers(1, 5),
    low=st.sampled_from([-1, -1, 0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**31),
)
def test_rows_equal_the_reference(
    tokens: int, topk: int, experts: int, low: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    weights = plain_weights(experts, 24, 40, dtype)
    ids = torch.randint(low, experts, (tokens, topk), dtype=torch.int32)
    done: list[int] = []
    op = operation(torch.randn(tokens, 24).to(dtype), ids, done)
    TorchBackend([weights]).submit([op])
    assert done == [0]
    # Inputs are exact in either precision; the activation is rounded to the model's dtype once.
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(
        op.out.double(), reference(weights, op), rtol=tolerance, atol=tolerance, equal_nan=True
    )


@pytest.mark.parametrize(("hidden", "inner"), [(128, 128), (256, 128), (200, 72), (128, 192)])
def test_block_scaled_fp8_equals_its_dequantised_values(hidden: int, inner: int) -> None:
    torch.manual_seed(0)
    blocks = -(-hidden // BLOCK), -(-inner // BLOCK), 2 * -(-inner // BLOCK)
    weights = ExpertWeights(
        torch.randn(2, 2 * inner, hidden).to(torch.float8_e4m3fn),
        torch.randn(2, hidden, inner).to(torch.float8_e4m3fn),
        torch.rand(2, blocks[2], blocks[0]) + 0.1,
        torch.rand(2, blocks[0], blocks[1]) + 0.1,
    )
    done: list[int] = []
    ids = torch.tensor([[0, 1], [1, -1]], dtype=torch.int32)
    op = operation(torch.randn(2, hidden), ids, done)
    TorchBackend([weights]).submit([op])
    expected = reference(weights, op)
    torch.testing.assert_close(op.out.double(), expected, rtol=1e-4, atol=1e-2, equal_nan=True)


def test_scales_belong_to_their_blocks() -> None:
    weight = torch.ones(BLOCK + 2, 2 * BLOCK).to(torch.float8_e4m3fn)
    values = dequantise(weight, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert values.shape == weight.shape
    corners = values[0, 0], values[0, BLOCK], values[BLOCK, BLOCK - 1], values[-1, -1]
    assert [float(c) for c in corners] == [1, 2, 3, 4]


def test_decode_goes_first_and_each_layer_has_its_weights() -> None:
    layers = [plain_weights(1, 8, 4, torch.float32) for _ in range(2)]
    done: list[int] = []
    x, ids = torch.randn(1, 8), torch.zeros(1, 1, dtype=torch.int32)
    ops = [
        operation(x, ids, done, source=0, phase=PHASE_PREFILL, layer=0),
        operation(x, ids, done, source=1, phase=PHASE_DECODE, layer=1),
    ]
    TorchBackend(layers).submit(ops)
    assert done == [1, 0]
    for op in ops:
        expected = reference(layers[op.layer], op)
        torch.testing.assert_close(op.out.double(), expected, rtol=1e-4, atol=1e-5)
    assert not torch.equal(ops[0].out, ops[1].out)
