"""Small operations of every kind, checked, for compute-sanitizer: under it a tile takes longer than
the tests' limits allow.

    compute-sanitizer --tool memcheck --kernel-name kns=expertplex python tests/gpu/sanitized.py
    compute-sanitizer --tool racecheck --kernel-name kns=expertplex python tests/gpu/sanitized.py
"""

from __future__ import annotations

import operands
import torch
from test_apk import BF16_LAYER_ERROR, FP8_LAYER_ERROR, ROWS, random_ids

from vllm_expertplex.moe_server.apk import structs
from vllm_expertplex.moe_server.apk.buffers import OperationTemplate
from vllm_expertplex.moe_server.apk.jit import KernelShape
from vllm_expertplex.moe_server.apk.kernel import PersistentKernel

CLUSTERS = 4
LIMITS = {"max_ms": 60_000, "tile_ms": 60_000}
PHASES = ((True, structs.PREFILL), (False, structs.DECODE))


def gemm_alone(kernel: PersistentKernel, wide: bool, stage: int) -> None:
    layer, rows = operands.random_layer(kernel.shape), ROWS["ragged"]
    op = OperationTemplate(kernel.shape, 1, wide, kernel.device, rows=8 * 320)
    operands.poison(op)
    operands.fill_rows(op)
    op.set_groups(rows, None if wide else [320 * e for e in range(9)])
    arrivals = [(0, structs.PREFILL, op.gemm_operation(0, 0, stage))]
    kernel.prepare([op], [layer], arrivals, **LIMITS).run()


def layer_alone(kernel: PersistentKernel, wide: bool, phase: int, tokens: int) -> None:
    layer = operands.random_layer(kernel.shape)
    op = OperationTemplate(kernel.shape, tokens, wide, kernel.device)
    operands.poison(op)
    operands.fill_tokens(op, tokens, random_ids(tokens, 4, 8))
    op.expert_ids[0, 0] = 3
    kernel.prepare([op], [layer], [(0, phase, op.operation(0, 0))], **LIMITS).run()
    error = operands.error(op.result, operands.moe64(op, layer, tokens))
    assert error < (BF16_LAYER_ERROR if kernel.shape.bf16 else FP8_LAYER_ERROR), error


def preempted(kernel: PersistentKernel) -> None:
    layers = [operands.random_layer(kernel.shape) for _ in range(2)]
    templates = [OperationTemplate(kernel.shape, n, n > 64, kernel.device) for n in (600, 64)]
    for op in templates:
        operands.fill_tokens(op, op.max_tokens, random_ids(op.max_tokens, 4, 8))
    arrivals = [
        (0, structs.PREFILL, templates[0].operation(0, 0, layer=1)),
        (50_000, structs.DECODE, templates[1].operation(1, 1, x_moe=8)),
    ]
    kernel.prepare(templates, layers, arrivals, hold_ns=20_000, **LIMITS).run()
    for layer, op in zip(reversed(layers), templates, strict=True):
        error = operands.error(op.result, operands.moe64(op, layer, op.max_tokens))
        assert error < FP8_LAYER_ERROR, error


def main(kinds: tuple[bool, ...] = (False, True)) -> None:
    for bf16 in kinds:
        shape = KernelShape(hidden=1024, intermediate=384, experts=8, top_k=4, bf16=bf16)
        kernel = PersistentKernel(shape, clusters=CLUSTERS)
        for wide, phase in PHASES:
            for stage in (structs.GATE_UP, structs.DOWN):
                gemm_alone(kernel, wide, stage)
            for tokens in (1, 64, 1100):  # the last has a counting stage
                layer_alone(kernel, wide, phase, tokens)
        if not bf16:
            preempted(kernel)
        print(f"{'bf16' if bf16 else 'fp8'}: right", flush=True)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
