"""The persistent kernel against float64, on the GPU: GEMM stages alone, then the whole operation,
then preempted.
"""

from __future__ import annotations

import operands
import pytest
import torch

from vllm_expertplex.moe_server.apk import structs
from vllm_expertplex.moe_server.apk.buffers import OperationTemplate
from vllm_expertplex.moe_server.apk.jit import KernelShape
from vllm_expertplex.moe_server.apk.kernel import PersistentKernel

pytestmark = pytest.mark.gpu
FP8_LAYER_ERROR = (
    0.05  # two FP8 roundings of activations; weights and inputs are exact in the reference
)
BF16_LAYER_ERROR = 0.01


@pytest.fixture(scope="module")
def small() -> PersistentKernel:
    return PersistentKernel(KernelShape(hidden=1024, intermediate=384, experts=8, top_k=4))


@pytest.fixture(scope="module")
def bf16() -> PersistentKernel:
    return PersistentKernel(
        KernelShape(hidden=1024, intermediate=384, experts=8, top_k=4, bf16=True)
    )


ROWS = {
    "even": [128] * 8,
    "ragged": [1, 16, 129, 64, 65, 300, 0, 17],
    "one expert": [0, 0, 0, 700, 0, 0, 0, 0],
    "one row": [0, 0, 0, 0, 0, 0, 0, 1],
    "large": [513, 256, 1024, 255, 257, 384, 640, 2],
}


@pytest.mark.parametrize("wide", [True, False], ids=["contiguous", "masked"])
@pytest.mark.parametrize("stage", [structs.GATE_UP, structs.DOWN], ids=["GateUp", "Down"])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("kind", ["small", "bf16"])
def test_gemm_matches_float64(
    request: pytest.FixtureRequest, kind: str, rows: list[int], stage: int, wide: bool
) -> None:
    kernel: PersistentKernel = request.getfixturevalue(kind)
    layer = operands.random_layer(kernel.shape)
    capacity = max(64, -(-max(rows) // 64) * 64)
    op = OperationTemplate(kernel.shape, 1, wide, kernel.device, rows=8 * capacity + 128)
    operands.poison(op)
    operands.fill_rows(op)
    op.set_groups(rows, None if wide else [capacity * e for e in range(9)])
    kernel.prepare([op], [layer], [(0, structs.PREFILL, op.gemm_operation(0, 0, stage))]).run()
    gemm = 0 if stage == structs.GATE_UP else 1
    a, sfa, out = ((op.rows, op.row_scales, op.hidden), (op.act, op.act_scales, op.down))[gemm]
    for e, count in enumerate(rows):
        at = slice(op.row0[e], op.row0[e] + count)
        if count:
            x = a[at].double() if kernel.shape.bf16 else operands.dequantise(a[at], sfa[:, at].t())
            assert operands.error(out[at], x @ operands.weights64(layer, gemm, e).t()) < 4e-3


def random_ids(tokens: int, k: int, experts: int) -> torch.Tensor:
    """Distinct experts of twice as many; those that live elsewhere are -1."""
    ids = torch.rand(tokens, 2 * experts, device="cuda").argsort(1)[:, :k]
    return torch.where(ids < experts, ids, -1)


@pytest.mark.parametrize("wide", [True, False], ids=["prefill", "decode"])
@pytest.mark.parametrize("tokens", [1, 7, 64, 1000, 3000])
@pytest.mark.parametrize("kind", ["small", "bf16"])
def test_whole_operation_matches_float64(
    request: pytest.FixtureRequest, kind: str, tokens: int, wide: bool
) -> None:
    kernel: PersistentKernel = request.getfixturevalue(kind)
    layer = operands.random_layer(kernel.shape)
    op = OperationTemplate(kernel.shape, tokens, wide, kernel.device)
    operands.poison(op)
    ids = random_ids(tokens, kernel.shape.top_k, kernel.shape.experts)
    ids[0, 0] = 3
    operands.fill_tokens(op, tokens, ids)
    phase = structs.PREFILL if wide else structs.DECODE
    kernel.prepare([op], [layer], [(0, phase, op.operation(0, 0))]).run()
    bound = BF16_LAYER_ERROR if kernel.shape.bf16 else FP8_LAYER_ERROR
    assert operands.error(op.result, operands.moe64(op, layer, tokens)) < bound


def test_all_tokens_on_one_expert_and_none_here(small: PersistentKernel) -> None:
    layer = operands.random_layer(small.shape)
    op = OperationTemplate(small.shape, 512, True, small.device)
    ids = torch.full((512, 4), -1, device="cuda")
    operands.poison(op)
    operands.fill_tokens(op, 512, ids)
    small.prepare([op], [layer], [(0, structs.PREFILL, op.operation(0, 0))]).run()
    assert torch.equal(op.result, torch.zeros_like(op.result))
    ids[:, 2] = 5
    operands.poison(op)
    operands.fill_tokens(op, 512, ids)
    small.prepare([op], [layer], [(0, structs.PREFILL, op.operation(0, 0))]).run()
    assert operands.error(op.result, operands.moe64(op, layer, 512)) < FP8_LAYER_ERROR


def test_buffers_for_more_tokens_than_can_be_gathered_are_refused(small: PersistentKernel) -> None:
    with pytest.raises(ValueError, match=r"4225 tokens.*at most 4224"):
        OperationTemplate(KernelShape(256, 128, 8, 8), 4225, True, small.device)


def test_preempted_results_are_bitwise_those_alone(small: PersistentKernel) -> None:
    layers = [operands.random_layer(small.shape) for _ in range(2)]
    prefill = OperationTemplate(small.shape, 8192, True, small.device)
    decodes = [OperationTemplate(small.shape, 64, False, small.device) for _ in range(4)]
    templates = [prefill, *decodes]
    for op in templates:
        operands.fill_tokens(op, op.max_tokens, random_ids(op.max_tokens, 4, 8))
    alone = []
    for op in templates:
        phase = structs.PREFILL if op is prefill else structs.DECODE
        operands.poison(op)
        small.prepare([op], layers, [(0, phase, op.operation(0, 0, layer=phase))]).run()
        alone.append(op.result.clone())
    budget = structs.Budget(44, 88, 8, 2)
    arrivals = [(0, structs.PREFILL, prefill.operation(0, 0, layer=1))]
    for n, decode in enumerate(decodes, 1):
        arrivals.append((20_000 * n, structs.DECODE, decode.operation(n, n, x_moe=8)))
    run = small.prepare(templates, layers, arrivals, budget, hold_ns=20_000)
    for _ in range(20):
        for op in templates:
            operands.poison(op)
        run.run()
        for op, result in zip(templates, alone, strict=True):
            assert torch.equal(op.result, result)
