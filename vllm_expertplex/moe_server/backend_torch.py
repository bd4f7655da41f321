"""A backend that runs one operation at a time with plain torch: the reference for every other.

Owns: the arithmetic of a routed expert on CPU. Must not know: where operations come from.

Rounding follows vLLM's CPU kernel (`cpu_fused_moe`): products accumulate in fp32, the activation
is rounded to the model dtype, the second product stays in fp32.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from vllm_expertplex.layout import PHASE_DECODE
from vllm_expertplex.moe_server.backend import ExpertWeights, Operation
from vllm_expertplex.quantization import dequantise


class TorchBackend:
    """Runs operations in the calling thread, decode before prefill."""

    def __init__(self, layers: Sequence[ExpertWeights]) -> None:
        self._layers = layers

    def submit(self, operations: Sequence[Operation]) -> None:
        for op in sorted(operations, key=lambda op: op.phase != PHASE_DECODE):
            compute(self._layers[op.layer], op)
            op.complete()

    def poll(self) -> list[int]:
        return []  # it has neither tiles nor workers to count

    def close(self) -> None:
        pass


def compute(weights: ExpertWeights, op: Operation) -> None:
    """Fill the rows of `op.out` that local experts make."""
    for slot in op.topk_ids.unique().tolist():
        if slot < 0:
            continue
        token, k = (op.topk_ids == slot).nonzero(as_tuple=True)
        op.out[token, k] = expert(weights, slot, op.x[token])


def expert(weights: ExpertWeights, slot: int, x: torch.Tensor) -> torch.Tensor:
    """One expert's unweighted output, [n, hidden] fp32, for rows x [n, hidden]."""
    # Gate and up have scale blocks of their own, also where one ends within a block.
    halves = weights.w13[slot].chunk(2)
    no_scales = (None, None)
    scales = no_scales if weights.w13_scale is None else weights.w13_scale[slot].chunk(2)
    gate, up = (x.float() @ dequantise(w, s).T for w, s in zip(halves, scales, strict=True))
    activation = (F.silu(gate) * up).to(x.dtype)
    scale2 = None if weights.w2_scale is None else weights.w2_scale[slot]
    return activation.float() @ dequantise(weights.w2[slot], scale2).T
