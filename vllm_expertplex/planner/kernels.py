"""Times of single components on one GPU, from rates: a roofline with stated floors.

Owns: attention, shared experts, routed experts and head as functions of batch and length; the
data-sheet side of eq. (2). `profile.py` has the measured side with the same methods.
Must not know: layouts, links. All times are seconds of one iteration, summed over the layers.
"""

from typing import Protocol

import numpy as np

from vllm_expertplex.planner.assumptions import Assumptions
from vllm_expertplex.planner.hardware import Gpu
from vllm_expertplex.planner.models import ModelSpec, Number
from vllm_expertplex.planner.routing import MoeLoad

PREFILL, DECODE = "prefill", "decode"


class Kernels(Protocol):
    """What the latency model asks about one GPU. `tp`: GPUs that share an attention server."""

    source: str

    def prefill_attention(self, requests: Number, length: Number, tp: int) -> Number:
        """`requests` prompts of `length` tokens, attention and dense layers."""

    def decode_attention(self, batch: Number, length: Number, tp: int) -> Number:
        """`batch` queries at context `length`, attention and dense layers."""

    def shared_experts(self, tokens: Number, tp: int) -> Number: ...

    def routed_experts(self, phase: str, load: MoeLoad, sms: Number) -> Number:
        """MoE operations under `load` per layer on the share `sms` (0-1] of a GPU."""

    def head(self, tokens: Number, tp: int) -> Number:
        """Embedding and LM head for `tokens` sampled positions."""


class Roofline:
    """`Kernels` from data-sheet rates and efficiencies."""

    def __init__(self, model: ModelSpec, gpu: Gpu, assumptions: Assumptions) -> None:
        self.model, self.gpu, self.assumptions = model, gpu, assumptions
        self.source = f"{gpu.name} rates ({gpu.source}; efficiencies: {gpu.efficiency.source})"
        e = gpu.efficiency
        self._hbm = gpu.hbm_bytes_per_s * e.hbm
        self._linear = gpu.flops(model.linear_bytes) * e.gemm
        self._expert = gpu.flops(model.expert_bytes) * e.gemm
        self._core = gpu.bf16_flops * e.attention
        dense = model.attention_parameters + model.dense_parameters
        self._weights = dense
        self._heads = max(1, min(a.heads for a in model.attention))

    def _matmul(self, parameters: float, tokens: Number, tp: int) -> Number:
        """Dense layers: whichever of the weight read and the arithmetic is longer."""
        read = parameters * self.model.linear_bytes / tp / self._hbm
        return np.maximum(read, 2.0 * parameters / tp * tokens / self._linear)

    def _elementwise(self, tokens: Number) -> Number:
        """Norms, rotary embedding, quantisation, residuals: about 20 passes over the hidden state.

        Tensor parallelism does not divide them.
        """
        passes = 20.0 * 2.0 * self.model.hidden * self.model.layers
        return tokens * passes / self._hbm

    def prefill_attention(self, requests: Number, length: Number, tp: int) -> Number:
        tokens = requests * length
        core: Number = 0.0
        for a in self.model.attention:
            core = core + a.layers * a.prefill_flops(length)
        floor = self.model.layers * self.assumptions.attention_floor_prefill
        work = self._matmul(self._weights, tokens, tp) + requests * core / tp / self._core
        return floor + work + self._elementwise(tokens)

    def decode_attention(self, batch: Number, length: Number, tp: int) -> Number:
        m = self.model
        read: Number = 0.0
        core: Number = 0.0
        for a in m.attention:
            part = 1.0 if a.kind == "mla" else max(1 / tp, 1 / max(a.kv_heads, 1))
            read = read + a.layers * part * a.read_bytes(length, m.kv_element_bytes)
            core = core + a.layers * a.decode_flops(length) / tp
        kv = batch * np.maximum(read / self._hbm, core / self._core)
        floor = m.layers * self.assumptions.attention_floor_decode
        return floor + self._matmul(self._weights, batch, tp) + kv + self._elementwise(batch)

    def shared_experts(self, tokens: Number, tp: int) -> Number:
        parameters = self.model.shared_parameters * self.model.moe_layers
        return self._matmul(parameters, tokens, tp) if parameters else 0.0 * tokens

    def routed_experts(self, phase: str, load: MoeLoad, sms: Number) -> Number:
        """Eq. (3): tiles bound the arithmetic, active experts the weight reads; rows move bytes."""
        m, a = self.model, self.assumptions
        prefill = phase == PREFILL
        tile = a.contiguous_tile if prefill else a.masked_tile
        overhead = a.apk_prefill_overhead if prefill else a.apk_decode_overhead
        bandwidth = self._hbm * np.minimum(1.0, sms / a.hbm_saturation)
        flops = load.x_moe * tile * 2.0 * m.expert_parameters / (self._expert * sms)
        read = load.active * m.expert_weight_bytes / bandwidth
        # scatter (1+1) H, gate-up product 2x2 I written and read, activation 2 I, down 2x2 H
        moved = load.rows * (6.0 * m.hidden + 10.0 * m.expert_intermediate) / bandwidth
        return m.moe_layers * (a.moe_floor + (1 + overhead) * np.maximum(flops, read) + moved)

    def head(self, tokens: Number, tp: int) -> Number:
        weights = self.model.vocab * self.model.hidden
        read = 2.0 * weights / tp / self._hbm
        return np.maximum(read, 2.0 * weights * tokens / tp / (self._core))
