"""Random experts and operations, and their results in float64."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from vllm_expertplex.layout import PHASE_DECODE
from vllm_expertplex.moe_server.backend import ExpertWeights, Operation
from vllm_expertplex.quantization import BLOCK

TIMEOUT_S = 30.0


@dataclass
class Shape:
    """Of a layer's local experts."""

    experts: int = 4
    hidden: int = 64
    intermediate: int = 32
    topk: int = 2


def make_layer(shape: Shape, dtype: torch.dtype, seed: int = 0) -> ExpertWeights:
    rng = torch.Generator().manual_seed(seed)
    w13 = torch.randn(shape.experts, 2 * shape.intermediate, shape.hidden, generator=rng)
    w2 = torch.randn(shape.experts, shape.hidden, shape.intermediate, generator=rng)
    w13, w2 = w13 * shape.hidden**-0.5, w2 * shape.intermediate**-0.5
    if dtype is not torch.float8_e4m3fn:
        return ExpertWeights(w13.to(dtype), w2.to(dtype))
    up, hidden = -(-shape.intermediate // BLOCK), -(-shape.hidden // BLOCK)
    scale13 = torch.rand(shape.experts, 2 * up, hidden, generator=rng) * 0.02 + 0.001
    scale2 = torch.rand(shape.experts, hidden, up, generator=rng) * 0.02 + 0.001
    return ExpertWeights((w13 * 64).to(dtype), (w2 * 64).to(dtype), scale13, scale2)


def clone(layer: ExpertWeights) -> ExpertWeights:
    """A copy for a backend to take over."""
    return replace(layer, w13=layer.w13.clone(), w2=layer.w2.clone())


def dequantised(layer: ExpertWeights) -> ExpertWeights:
    """The bf16 checkpoint that an FP8 one stands for. Gate and up have their own blocks."""
    assert layer.w13_scale is not None
    assert layer.w2_scale is not None

    def expand(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        wide = scale.repeat_interleave(BLOCK, -2)[..., : weight.shape[-2], :]
        return weight.float() * wide.repeat_interleave(BLOCK, -1)[..., : weight.shape[-1]]

    halves = zip(layer.w13.chunk(2, 1), layer.w13_scale.chunk(2, 1), strict=True)
    w13 = torch.cat([expand(w, s) for w, s in halves], 1)
    return ExpertWeights(w13.bfloat16(), expand(layer.w2, layer.w2_scale).bfloat16())


class Pending:
    """A submitted operation that can be waited for."""

    def __init__(self, op: Operation, told: Callable[[], None] = lambda: None) -> None:
        self._event, self._told = threading.Event(), told
        self.completions = 0
        self.op = replace(op, out=torch.full_like(op.out, float("nan")), complete=self._complete)

    def _complete(self) -> None:
        self.completions += 1
        self._told()
        self._event.set()

    def result(self) -> torch.Tensor:
        assert self._event.wait(TIMEOUT_S), f"operation of source {self.op.source} did not finish"
        return self.op.out


def make_operation(
    shape: Shape,
    tokens: int,
    dtype: torch.dtype,
    *,
    phase: int = PHASE_DECODE,
    source: int = 0,
    layer: int = 0,
    absent: float = 0.2,
    seed: int = 0,
) -> Operation:
    """Each token's experts differ; a share of them, `absent`, lives on another server."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, shape.hidden, generator=rng).to(dtype)
    ids = torch.rand(tokens, shape.experts, generator=rng).argsort(-1)[:, : shape.topk].int()
    ids[torch.rand(tokens, shape.topk, generator=rng) < absent] = -1
    out = torch.empty(tokens, shape.topk, shape.hidden)
    return Operation(source, phase, layer, x, ids.contiguous(), out, lambda: None)


def reference(layer: ExpertWeights, op: Operation) -> torch.Tensor:
    """The rows in float64, with no rounding in between; NaN where the expert is elsewhere."""
    out = torch.full(op.out.shape, float("nan"), dtype=torch.float64)
    for k in range(op.topk_ids.shape[1]):
        for slot in range(layer.w13.shape[0]):
            rows = op.topk_ids[:, k] == slot
            gate, up = (op.x[rows].double() @ layer.w13[slot].double().T).chunk(2, -1)
            hidden = torch.nn.functional.silu(gate) * up
            out[rows, k] = hidden @ layer.w2[slot].double().T
    return out
