"""Device memory of the persistent kernel: layers' weights, and operation templates.

All sizes follow from one limit per template, the tokens of an operation; nothing is allocated once
the kernel runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from . import structs
from .driver import tensor_map
from .jit import KernelShape

ROW_ALIGNMENT = 64  # an expert's rows begin at a multiple of this


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def to_device(items: Sequence[ctypes.Structure], device: torch.device) -> torch.Tensor:
    """Structures as bytes on the device."""
    raw = b"".join(bytes(item) for item in items)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(device)


def max_rows(shape: KernelShape, tokens: int) -> int:
    """Rows that `tokens` tokens can need: all experts of all of them here, each expert padded."""
    pairs = tokens * min(shape.top_k, shape.experts)
    return _ceil(pairs + min(shape.experts, pairs) * (ROW_ALIGNMENT - 1), 128) * 128


def expert_tiles(rows: int, n: int, wide: bool, decode_n: int) -> int:
    """Cluster tiles of one expert; the kernel's `expert_tiles`."""
    if wide:
        blocks, columns = _ceil(rows, 128), _ceil(n, 192)
        return blocks // 2 * columns + blocks % 2 * _ceil(columns, 2)
    if rows <= 64:
        return _ceil(n, 4 * decode_n) if rows else 0
    return _ceil(rows, 128) * _ceil(n, 256)


def buffer_bytes(shape: KernelShape, tokens: int) -> int:
    """GPU memory of `OperationBuffers` for `tokens` tokens."""
    h, i, item = shape.hidden, shape.intermediate, 2 if shape.bf16 else 1
    per_row = (h + i) * item + (h + i) // 128 * 4 + (2 * i + h) * 2
    return max_rows(shape, tokens) * per_row + tokens * shape.top_k * 8


class LayerWeights:
    """One layer's experts: `gate_up` [E, 2I, H] and `down` [E, H, I].

    FP8 weights have fp32 scales [E, n/128, k/128]. Raises ValueError on any other shape.
    """

    def __init__(
        self,
        shape: KernelShape,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        gate_up_scales: torch.Tensor | None = None,
        down_scales: torch.Tensor | None = None,
    ) -> None:
        e, h, i = shape.experts, shape.hidden, shape.intermediate
        for name, weight, want in (("gate_up", gate_up, (e, 2 * i, h)), ("down", down, (e, h, i))):
            if tuple(weight.shape) != want or not weight.is_contiguous():
                raise ValueError(
                    f"{name} weights are {tuple(weight.shape)}; expected contiguous {want}"
                )
        self.weights = (gate_up, down)
        self.scales = (gate_up_scales, down_scales)
        self.struct = structs.Layer()
        columns = 64 if shape.bf16 else 128
        for g, weight in enumerate(self.weights):
            flat = weight.view(-1, weight.shape[-1])
            box = 96 if shape.multicast == 2 else 192
            self.struct.wide[g][:] = tensor_map(flat, box, columns, True)
            self.struct.narrow[g][:] = tensor_map(flat, 128, columns, True)
            scales = self.scales[g]
            self.struct.scales[g] = scales.data_ptr() if scales is not None else 0


class Operands(NamedTuple):
    """Device addresses of what an operation is given and where its result goes; T tokens."""

    tokens: int  # [T, H] FP8 or bf16
    token_scales: int  # [T, H / 128] fp32; FP8 only
    expert_ids: int  # [T, K] int32: local expert, or negative where it is elsewhere
    expert_weights: int  # [T, K] fp32
    result: int  # [T, H] bf16


class OperationBuffers:
    """What the kernel needs to run operations of up to `tokens` tokens, one at a time: rows in
    expert order, intermediate values, descriptors. `operands` stay the caller's. Raises ValueError
    for more tokens than the kernel can compute at once, see `KernelShape.most_tokens`.
    """

    def __init__(
        self,
        shape: KernelShape,
        tokens: int,
        operands: Operands,
        device: torch.device,
        rows: int | None = None,
    ) -> None:
        shape.check_tokens(tokens)
        h, i, k = shape.hidden, shape.intermediate, shape.top_k
        self.shape, self.max_tokens = shape, tokens
        self.row_capacity = r = rows or max_rows(shape, tokens)
        act = torch.bfloat16 if shape.bf16 else torch.float8_e4m3fn

        def empty(*size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        self.position = empty(tokens, k, dtype=torch.int32)
        self.row_of = empty(tokens, k, dtype=torch.int32)
        self.rows, self.row_scales = empty(r, h, dtype=act), empty(h // 128, r, dtype=torch.float32)
        self.hidden = empty(r, 2 * i, dtype=torch.bfloat16)
        self.act, self.act_scales = empty(r, i, dtype=act), empty(i // 128, r, dtype=torch.float32)
        self.down = empty(r, h, dtype=torch.bfloat16)
        self.groups = torch.zeros(
            2 + 2 * shape.experts + 3 * (shape.experts + 1), dtype=torch.int32, device=device
        )
        self.struct = self._describe(operands)

    def _describe(self, operands: Operands) -> structs.Template:
        s, columns = structs.Template(), 64 if self.shape.bf16 else 128
        for g, (a, sfa, out) in enumerate(
            ((self.rows, self.row_scales, self.hidden), (self.act, self.act_scales, self.down))
        ):
            for b, box in enumerate((128, 64, 16)):
                s.a[g][b][:] = tensor_map(a, box, columns, True)
                s.sfa[g][b][:] = tensor_map(sfa, 1, box, False)
            for b, box in enumerate((64, 16)):
                s.out[g][b][:] = tensor_map(out, box, 64, True)
        for name, address in operands._asdict().items():
            setattr(s, name, address)
        for name in (
            "position",
            "row_of",
            "rows",
            "row_scales",
            "hidden",
            "act",
            "act_scales",
            "down",
            "groups",
        ):
            setattr(s, name, getattr(self, name).data_ptr())
        s.row_capacity = self.row_capacity
        return s


class OperationTemplate(OperationBuffers):
    """Buffers with operands of their own, for operations that the host lists.

    `wide`: prefill's tiles, else decode's.
    """

    def __init__(
        self,
        shape: KernelShape,
        tokens: int,
        wide: bool,
        device: torch.device,
        rows: int | None = None,
    ) -> None:
        def empty(columns: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(tokens, columns, dtype=dtype, device=device)

        self.tokens = empty(shape.hidden, torch.bfloat16 if shape.bf16 else torch.float8_e4m3fn)
        self.token_scales = empty(shape.hidden // 128, torch.float32)
        self.expert_ids = empty(shape.top_k, torch.int32)
        self.expert_weights = empty(shape.top_k, torch.float32)
        self.result = empty(shape.hidden, torch.bfloat16)
        operands = Operands(*(getattr(self, name).data_ptr() for name in Operands._fields))
        super().__init__(shape, tokens, operands, device, rows)
        self.wide, self.n_tokens = wide, tokens

    def set_tokens(self, tokens: int) -> None:
        """How many tokens the next operation has."""
        if not 0 < tokens <= self.max_tokens:
            raise ValueError(
                f"{tokens} tokens in an operation; this template takes 1 to {self.max_tokens}"
            )
        self.n_tokens = tokens

    def operation(
        self, template: int, identity: int, layer: int = 0, x_moe: int = 0
    ) -> structs.Operation:
        """All six stages; the kernel works out their tiles."""
        user = structs.handle(template, self.wide, self.n_tokens, identity)
        return structs.Operation(sources=1, user=user, layer=layer, x_moe=x_moe, n_stages=0)

    def set_groups(self, rows: Sequence[int], row0: Sequence[int] | None = None) -> None:
        """Lays out experts' rows from the host, for running GEMM stages alone.

        `row0`: first row of each expert and the end; packed by default.
        """
        e = self.shape.experts
        if row0 is None:
            row0 = [0]
            for r in rows:
                row0.append(row0[-1] + _ceil(r, ROW_ALIGNMENT) * ROW_ALIGNMENT)
        prefix = []
        for n in (2 * self.shape.intermediate, self.shape.hidden):
            sums = [0]
            for r in rows:
                sums.append(sums[-1] + expert_tiles(r, n, self.wide, self.shape.decode_n))
            prefix.append(sums)
        flat = [0] * (e + 1) + list(rows) + list(row0)[: e + 1] + prefix[0] + prefix[1] + [1]
        self.groups.copy_(torch.tensor(flat, dtype=torch.int32))
        self.row0, self.totals = list(row0), (prefix[0][-1], prefix[1][-1])

    def gemm_operation(
        self, template: int, identity: int, stage: int, layer: int = 0, x_moe: int = 0
    ) -> structs.Operation:
        """One GEMM stage over the groups of `set_groups`."""
        user = structs.handle(template, self.wide, self.n_tokens, identity)
        op = structs.Operation(sources=1, user=user, layer=layer, x_moe=x_moe)
        op.tiles[stage] = self.totals[0 if stage == structs.GATE_UP else 1]
        op.n_stages = stage + 1
        return op
