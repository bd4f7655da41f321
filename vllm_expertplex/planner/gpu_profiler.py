"""Measuring one layer's attention and MoE operation of a model on a GPU.

Owns: the measured shapes and the timing. Must not know: fits, files, the planner's model.

The same kernels as in a deployment: FlashAttention 3 and the FP8 or bf16 products that vLLM
carries, in a CUDA graph for decode; for MoE the persistent kernel, launched on as many SMs as the
budget says. Norms and quantisation are there, rotary embedding and the cache's write are not.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from vllm_expertplex.cuda.graph import captured_times
from vllm_expertplex.moe_server.apk import structs
from vllm_expertplex.moe_server.apk.buffers import LayerWeights, OperationTemplate
from vllm_expertplex.moe_server.apk.jit import KernelShape
from vllm_expertplex.moe_server.apk.kernel import PersistentKernel
from vllm_expertplex.planner.fit import Point
from vllm_expertplex.planner.models import ModelSpec
from vllm_expertplex.planner.profiler import Grid

PREFILL_TILE, DECODE_TILE = 128, 64  # rows of a tile in the persistent kernel
PAGE = 16  # tokens of a KV block
_MOST_KV = 1 << 20  # tokens of KV cache in a decode batch
_WARM, _TIMES = 2, 7
_REPLAYS = 4  # layers in one graph


def gpu_grid(most_tokens: int) -> Grid:
    """Shapes that a GPU measures in seconds."""
    lengths = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
    return Grid(
        prefill=tuple((n, s) for s in lengths for n in (1, 2, 4, 8, 16) if n * s <= most_tokens),
        decode=tuple(
            (b, s) for b in (1, 2, 4, 8, 16, 32, 64, 128, 256) for s in (256, 512, 1024, 2048, 8192)
            if b * s <= _MOST_KV
        ),
        prefill_tokens=tuple(n for n in (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096,
                                         6144, 8192) if n <= most_tokens),
        decode_tokens=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256),
    )  # fmt: skip


class GpuProfiler:
    """Times one layer of `model` on the current GPU. ValueError for a model it cannot measure."""

    def __init__(self, model: ModelSpec) -> None:
        attention = max(model.attention, key=lambda a: a.layers)
        if attention.kind != "gqa" or attention.index_topk or attention.window:
            raise ValueError(
                f"profiling {attention.kind} attention with a window or an indexer, or latent "
                "attention, is not supported on GPUs; grouped-query attention is"
            )
        self.model, self._attention = model, attention
        # Bytes count the blocks' scales, too.
        self.fp8 = model.expert_bytes < 2
        shape = KernelShape(
            model.hidden, model.expert_intermediate, model.experts, model.top_k, bf16=not self.fp8
        )
        self._shape, self._layer = shape, _random_experts(shape)
        self.sms = torch.cuda.get_device_properties(0).multi_processor_count

    def prefill(self, grid: Grid) -> Iterator[Point]:
        """Attention of `x` prompts of `s` tokens."""
        layer = self._attention_layer()
        for n, s in grid.prefill:
            yield Point(n, s, _events_s(layer(n, s, s)))

    def decode(self, grid: Grid) -> Iterator[Point]:
        """Attention of `x` queries at context `s`, in a CUDA graph."""
        layer = self._attention_layer()
        for b, s in grid.decode:
            yield Point(b, s, _graph_s(layer(b, 1, s)))

    def _attention_layer(self) -> Callable[[int, int, int], Callable[[], object]]:
        from vllm import _custom_ops as ops
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        a, hidden = self._attention, self.model.hidden
        q_width, kv_width = a.heads * a.head_dim, a.kv_heads * a.head_dim
        qkv, out = (
            _Linear(hidden, q_width + 2 * kv_width, self.model.linear_bytes < 2),
            _Linear(q_width, hidden, self.model.linear_bytes < 2),
        )
        norm = _normal(hidden)
        pages = -(-_MOST_KV // PAGE)
        keys, values = (_normal(pages, PAGE, a.kv_heads, a.head_dim) for _ in range(2))

        def case(n: int, new: int, length: int) -> Callable[[], object]:
            rows = n * new
            padded = -(-rows // 4) * 4  # FP8 products take four rows or more
            x, residual = _normal(padded, hidden), _normal(padded, hidden)
            attended = _normal(padded, a.heads, a.head_dim)
            each = -(-length // PAGE)
            table = torch.arange(n * each, device="cuda", dtype=torch.int32).view(n, each)
            starts = torch.arange(n + 1, device="cuda", dtype=torch.int32) * new
            used = torch.full((n,), length, device="cuda", dtype=torch.int32)

            def layer() -> object:
                y = torch.empty_like(x)
                ops.rms_norm(y, x, norm, 1e-6)
                q = qkv(y)[:rows, :q_width].unflatten(1, (a.heads, a.head_dim))
                flash_attn_varlen_func(
                    q,
                    keys,
                    values,
                    max_seqlen_q=new,
                    cu_seqlens_q=starts,
                    max_seqlen_k=length,
                    seqused_k=used,
                    block_table=table,
                    causal=True,
                    fa_version=3,
                    out=attended[:rows],
                )
                z = out(attended.flatten(1))
                ops.fused_add_rms_norm(z, residual, norm, 1e-6)
                return z

            return layer

        return case

    def moe(self, phase: str, tokens: tuple[int, ...], sms: int) -> Iterator[Point]:
        """MoE operation of `phase` on `sms` SMs, from its submission to its end: `x` is x_moe
        (eq. 3) of the drawn routing, `s` its rows.
        """
        m, wide = self.model, phase == "prefill"
        kernel = PersistentKernel(self._shape, clusters=sms // 2)
        op = OperationTemplate(self._shape, max(tokens), wide, kernel.device)
        op.tokens.copy_(torch.randn(op.tokens.shape, device="cuda").to(op.tokens.dtype))
        op.token_scales.fill_(1.0)
        op.expert_weights.fill_(1 / m.top_k)
        rng = np.random.default_rng(0)
        for count in tokens:
            ids = np.stack([rng.choice(m.experts, m.top_k, replace=False) for _ in range(count)])
            rows = np.bincount(ids.ravel(), minlength=m.experts)
            tile = PREFILL_TILE if wide else DECODE_TILE
            x_moe = float(np.ceil(rows / tile).sum())
            op.expert_ids[:count].copy_(torch.from_numpy(ids.astype(np.int32)))
            op.set_tokens(count)
            arrival = (0, structs.PREFILL if wide else structs.DECODE, op.operation(0, 0))
            run = kernel.prepare([op], [self._layer], [arrival])
            times = [run.run().operations[0] for _ in range(_WARM + _TIMES)][_WARM:]
            seconds = statistics.median(done - submitted for submitted, _, done in times) / 1e9
            yield Point(x_moe, float(count * m.top_k), seconds)


class _Linear:
    """x [n, k] @ w [m, k]^T in bf16, or in FP8 with 1x128 and 128x128 scales."""

    def __init__(self, k: int, m: int, fp8: bool) -> None:
        self._fp8, self._weight = fp8, _normal(m, k)
        if fp8:
            self._weight = self._weight.to(torch.float8_e4m3fn)
            self._scale = torch.full((m // 128, k // 128), k**-0.5, device="cuda")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self._fp8:
            return torch.nn.functional.linear(x, self._weight)
        from vllm import _custom_ops as ops
        from vllm.model_executor.layers.quantization.utils.fp8_utils import (
            per_token_group_quant_fp8,
        )

        q, scales = per_token_group_quant_fp8(x, 128, column_major_scales=True, use_ue8m0=False)
        return ops.cutlass_scaled_mm(q, self._weight.T, scales, self._scale.T, torch.bfloat16)


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _random_experts(shape: KernelShape) -> LayerWeights:
    e, h, i = shape.experts, shape.hidden, shape.intermediate
    dtype = torch.bfloat16 if shape.bf16 else torch.float8_e4m3fn
    weights, scales = [], []
    for n, k in ((2 * i, h), (h, i)):
        weight = torch.empty(e, n, k, dtype=dtype, device="cuda")
        for expert in weight:  # one at a time: fp32 values take four times the room
            expert.copy_(torch.randn(n, k, device="cuda"))
        weights.append(weight)
        scale = None if shape.bf16 else torch.full((e, n // 128, k // 128), k**-0.5, device="cuda")
        scales.append(scale)
    return LayerWeights(shape, *weights, *scales)


def _events_s(work: Callable[[], object]) -> float:
    """Median seconds of one call, queued back to back."""
    times = []
    for _ in range(_WARM + _TIMES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(200_000)  # so that launches are queued before they run
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[_WARM:])


def _graph_s(work: Callable[[], Any]) -> float:
    """Median seconds of one call in a CUDA graph of several."""
    return _events_s(captured_times(work, _REPLAYS).replay) / _REPLAYS
