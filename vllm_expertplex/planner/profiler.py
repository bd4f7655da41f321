"""Measuring one layer's attention and MoE operation of a model with torch, on the CPU.

Owns: the measured shapes and the timing loop. Must not know: fits, files, the planner's model.
The CPU plays the MoE server's part with threads in place of SMs: an SM budget is a thread count.
"""

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_expertplex.planner.fit import Point
from vllm_expertplex.planner.models import MLA, Attention, ModelSpec

if TYPE_CHECKING:
    import torch

REPEATS = 9


class Grid(NamedTuple):
    """Shapes to measure."""

    prefill: tuple[tuple[int, int], ...]  # (requests, length)
    decode: tuple[tuple[int, int], ...]  # (batch, context)
    prefill_tokens: tuple[int, ...]
    decode_tokens: tuple[int, ...]


def cpu_grid(most_tokens: int = 2048) -> Grid:
    """Shapes that a CPU measures in a minute or two."""
    lengths = [n for n in (16, 32, 64, 128, 256, 512, 1024, 2048) if n <= most_tokens]
    return Grid(
        prefill=tuple((n, s) for s in lengths for n in (1, 2, 4) if n * s <= most_tokens),
        decode=tuple((b, s) for b in (1, 2, 4, 8, 16, 32) for s in lengths if b * s <= 16384),
        prefill_tokens=tuple(n for n in (32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
                             if n <= most_tokens),
        decode_tokens=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64),
    )  # fmt: skip


class CpuProfiler:
    """Times one layer of `model` in `dtype` with `threads` torch threads."""

    def __init__(self, model: ModelSpec, dtype: str, seed: int = 0) -> None:
        import torch

        self.model, self.dtype = model, getattr(torch, dtype)
        self._torch = torch
        self._generator = torch.Generator().manual_seed(seed)
        self._attention = max(model.attention, key=lambda a: a.layers)
        if self._attention.kind not in ("gqa", MLA) or self._attention.index_topk:
            raise ValueError(
                f"profiling {self._attention.kind} attention"
                f"{' with an indexer' if self._attention.index_topk else ''} is not supported; "
                "supported are GQA and dense MLA"
            )

    def _random(self, *shape: int) -> "torch.Tensor":
        return self._torch.randn(*shape, generator=self._generator).to(self.dtype)

    def prefill(self, grid: Grid, threads: int) -> Iterator[Point]:
        """Attention of `x` prompts of `s` tokens."""
        run = self._attention_layer()
        for n, s in grid.prefill:
            yield Point(n, s, self._time(threads, run(n, s, s)))

    def decode(self, grid: Grid, threads: int) -> Iterator[Point]:
        """Attention of `x` queries at context `s`."""
        run = self._attention_layer()
        for b, s in grid.decode:
            yield Point(b, s, self._time(threads, run(b, 1, s)))

    def _attention_layer(self) -> Callable[[int, int, int], Callable[[], object]]:
        a, hidden, functional = self._attention, self.model.hidden, self._torch.nn.functional
        qk, v, kv_heads = _head_shape(a)
        w_q = self._random(a.heads * qk, hidden)
        w_kv = self._random(kv_heads * (qk + v), hidden)
        w_o = self._random(hidden, a.heads * v)
        norm = self._random(hidden)

        def case(n: int, new: int, length: int) -> Callable[[], object]:
            x = self._random(n * new, hidden)
            keys, values = (
                self._random(n, kv_heads, length, qk),
                self._random(n, kv_heads, length, v),
            )

            def layer() -> object:
                y = functional.rms_norm(x, (hidden,), norm)
                q = functional.linear(y, w_q).view(n, new, a.heads, qk).transpose(1, 2)
                functional.linear(y, w_kv)
                out = functional.scaled_dot_product_attention(
                    q, keys, values, is_causal=new > 1, enable_gqa=kv_heads != a.heads
                )
                return functional.linear(out.transpose(1, 2).reshape(n * new, -1), w_o) + x

            return layer

        return case

    def moe(self, tokens: tuple[int, ...], threads: int, tile: int) -> Iterator[Point]:
        """MoE operation: `x` is x_moe (eq. 3) of the drawn routing at `tile`, `s` its rows."""
        m, torch = self.model, self._torch
        gate_up = self._random(m.experts, 2 * m.expert_intermediate, m.hidden) * 0.02
        down = self._random(m.experts, m.hidden, m.expert_intermediate) * 0.02
        rng = np.random.default_rng(0)
        for count in tokens:
            ids = np.stack([rng.choice(m.experts, m.top_k, replace=False) for _ in range(count)])
            rows = np.bincount(ids.ravel(), minlength=m.experts)
            x_moe = float(np.ceil(rows / tile).sum())
            x = self._random(count, m.hidden)
            chosen = torch.from_numpy(ids.ravel())
            order = torch.argsort(chosen, stable=True)
            token = order // m.top_k
            ends = np.cumsum(rows)
            active = [(e, int(ends[e] - rows[e]), int(ends[e])) for e in np.flatnonzero(rows)]

            def operation(x=x, token=token, active=active) -> object:  # type: ignore[no-untyped-def]
                linear, silu = torch.nn.functional.linear, torch.nn.functional.silu
                routed = x[token]
                out = torch.zeros_like(x)
                for expert, begin, end in active:
                    gate, up = linear(routed[begin:end], gate_up[expert]).chunk(2, dim=-1)
                    out.index_add_(0, token[begin:end], linear(silu(gate) * up, down[expert]))
                return out

            yield Point(x_moe, float(count * m.top_k), self._time(threads, operation))

    def _time(self, threads: int, run: Callable[[], object]) -> float:
        """Seconds of the fastest of a few runs: what disturbs a run only ever adds to it."""
        self._torch.set_num_threads(threads)
        with self._torch.inference_mode():
            run()
            times = []
            for _ in range(REPEATS):
                begin = time.perf_counter()
                run()
                times.append(time.perf_counter() - begin)
        return min(times)


def _head_shape(a: Attention) -> tuple[int, int, int]:
    """(query-key width, value width, KV heads); MLA is expanded, as in prefill."""
    if a.kind == MLA:
        return a.nope_dim + a.rope_dim, a.v_dim, a.heads
    return a.head_dim, a.head_dim, a.kv_heads
