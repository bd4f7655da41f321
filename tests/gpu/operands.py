"""Random operands and float64 references for the kernel's GPU tests."""

from __future__ import annotations

import torch

from vllm_expertplex.moe_server.apk.buffers import LayerWeights, OperationTemplate
from vllm_expertplex.moe_server.apk.jit import KernelShape


def dequantise(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[R, k] FP8 with [R, k/128] scales, as float64."""
    return rows.double() * scales.double().repeat_interleave(128, 1)


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """1x128 FP8: values and [R, k/128] scales."""
    blocks = x.float().view(x.shape[0], -1, 128)
    scales = blocks.abs().amax(-1).clamp(min=1e-10) / 448
    return (blocks / scales[..., None]).to(torch.float8_e4m3fn).view(x.shape), scales


def random_layer(shape: KernelShape) -> LayerWeights:
    e, h, i = shape.experts, shape.hidden, shape.intermediate
    if shape.bf16:
        up = torch.randn(e, 2 * i, h, device="cuda", dtype=torch.bfloat16) * h**-0.5
        down = torch.randn(e, h, i, device="cuda", dtype=torch.bfloat16) * i**-0.5
        return LayerWeights(shape, up, down)
    up = torch.randn(e, 2 * i, h, device="cuda").to(torch.float8_e4m3fn)
    down = torch.randn(e, h, i, device="cuda").to(torch.float8_e4m3fn)

    def scales(n: int, k: int) -> torch.Tensor:
        return (torch.rand(e, n // 128, k // 128, device="cuda") + 0.5) * k**-0.5

    return LayerWeights(shape, up, down, scales(2 * i, h), scales(h, i))


def weights64(layer: LayerWeights, gemm: int, expert: int) -> torch.Tensor:
    w, s = layer.weights[gemm][expert].double(), layer.scales[gemm]
    if s is None:
        return w
    return w * s[expert].double().repeat_interleave(128, 0).repeat_interleave(128, 1)


def fill_rows(op: OperationTemplate) -> None:
    """Random activations in the grouped buffers, for running GEMM stages alone."""
    for rows, scales in ((op.rows, op.row_scales), (op.act, op.act_scales)):
        rows.copy_(torch.randn(rows.shape, device="cuda").to(rows.dtype))
        scales.copy_(torch.rand(scales.shape, device="cuda") + 0.5)


def fill_tokens(op: OperationTemplate, tokens: int, ids: torch.Tensor) -> None:
    """Random tokens with the given [tokens, k] local expert ids (negative: not here)."""
    x = torch.randn(tokens, op.shape.hidden, device="cuda")
    if op.shape.bf16:
        op.tokens[:tokens] = x.bfloat16()
    else:
        op.tokens[:tokens], op.token_scales[:tokens] = quantise(x)
    op.expert_ids[:tokens] = ids.int()
    op.expert_weights[:tokens] = torch.rand(ids.shape, device="cuda")
    op.set_tokens(tokens)


def poison(op: OperationTemplate) -> None:
    """Every intermediate and result becomes NaN, so that what is not written cannot pass."""
    for t in (op.rows, op.row_scales, op.hidden, op.act, op.act_scales, op.down, op.result):
        t.view(torch.uint8).fill_(0xFF)
    op.position.fill_(-1)
    op.row_of.fill_(-1)


def moe64(op: OperationTemplate, layer: LayerWeights, tokens: int) -> torch.Tensor:
    """The whole layer in float64 from the quantised inputs, without requantising in between."""
    x = op.tokens[:tokens].double()
    if not op.shape.bf16:
        x = dequantise(op.tokens[:tokens], op.token_scales[:tokens])
    out = torch.zeros(tokens, op.shape.hidden, dtype=torch.float64, device="cuda")
    for e in range(op.shape.experts):
        at, slot = (op.expert_ids[:tokens] == e).nonzero(as_tuple=True)
        if len(at) == 0:
            continue
        gate, up = (x[at] @ weights64(layer, 0, e).t()).chunk(2, dim=-1)
        y = (torch.nn.functional.silu(gate) * up) @ weights64(layer, 1, e).t()
        out.index_add_(0, at, y * op.expert_weights[at, slot].double()[:, None])
    return out


def error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """||out - ref|| / ||ref||; NaN never compares below a bound."""
    return float((out.double() - ref).norm() / ref.norm())
