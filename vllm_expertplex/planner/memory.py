"""What fits on each GPU: weights, worst-case APK buffers, KV cache, graphs.

Owns: bytes per role and the KV capacity that is left. Must not know: latency.
Array arguments broadcast, so that the search can ask for many layouts at once.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_expertplex.planner.assumptions import Assumptions
from vllm_expertplex.planner.hardware import Gpu
from vllm_expertplex.planner.models import ModelSpec, Number

Array = NDArray[Any]


class Memory:
    """Memory of one model on one kind of GPU."""

    def __init__(self, model: ModelSpec, gpu: Gpu, assumptions: Assumptions) -> None:
        self.model = model
        self.gpu = gpu
        self.assumptions = assumptions
        self.usable = gpu.memory_bytes * assumptions.memory_utilisation
        self.attention_usable = self.usable  # of it, what one attention server may take

    def experts(self, servers: Number) -> Number:
        """Routed-expert bytes on the fullest of `servers` MoE servers."""
        per_server = np.ceil(self.model.experts / servers)
        return per_server * self.model.expert_weight_bytes * self.model.moe_layers

    def buffers(self, prefill: Number, decode: Number, servers: Number) -> Number:
        """APK buffers on one MoE server for that many prefill and decode sources.

        A routed row needs its dispatch (FP8) and combine copies and what the grouped GEMMs leave
        between them (16-bit gate-up product, FP8 activation): 3H + 3I bytes with 16-bit sums. They
        are allocated for the largest volume: templates fix addresses (paper, section 5).
        """
        a, m = self.assumptions, self.model
        row = (1.0 + a.combine_bytes) * m.hidden + 3.0 * m.expert_intermediate
        tokens = prefill * float(a.prefill_tokens) + decode * float(a.decode_slots)
        rows: Number = tokens * float(m.top_k)
        if a.buffers == "average":
            rows = rows * 1.5 / servers
        return rows * row

    def moe_server(self, prefill: Number, decode: Number, servers: Number) -> Number:
        """All bytes of the fullest MoE server."""
        held = self.experts(servers) + self.buffers(prefill, decode, servers)
        return held + self.assumptions.runtime_reserve

    def moe_fits(self, prefill: Number, decode: Number, servers: Number) -> NDArray[np.bool_]:
        return np.asarray(self.moe_server(prefill, decode, servers) <= self.usable)

    def share(self, prefill: int, decode: int, servers: int, readers: int) -> None:
        """`readers` attention servers share what a MoE server leaves of its GPU, evenly
        (`serve/gpu_memory.py`).
        """
        held = float(self.moe_server(prefill, decode, servers))
        self.attention_usable = (self.usable - held) / readers

    def prefill_bounds(
        self, servers: Array, total: Array, tp_prefill: int, tp_decode: int
    ) -> tuple[Array, Array]:
        """Fewest and most prefill GPUs, of `total` attention GPUs, whose buffers fit.

        Buffers are linear in that number, so the bounds are exact. Empty (low > high) when none is.
        """
        per_prefill = self.buffers(1.0 / tp_prefill, 0.0, servers)
        per_decode = self.buffers(0.0, 1.0 / tp_decode, servers)
        free = self.usable - self.assumptions.runtime_reserve - self.experts(servers)
        room, slope = free - total * per_decode, per_prefill - per_decode  # P slope <= room
        with np.errstate(divide="ignore", invalid="ignore"):
            edge = room / slope
        high = np.where(slope > 0, np.floor(edge + 1e-9), np.where(room >= 0, total, -1))
        low = np.where(slope < 0, np.maximum(0, np.ceil(edge - 1e-9)), 0)
        return low, np.where(slope < 0, total, high)

    def attention_server(self, tp: int) -> float:
        """Bytes of one attention GPU before its KV cache."""
        return self.model.attention_server_bytes / tp + self.assumptions.graph_reserve

    def kv_bytes(self, tp: int) -> float:
        """KV bytes of one request group of `tp` GPUs, in units of a whole request's KV.

        Negative when the attention weights do not fit.
        """
        return (self.attention_usable - self.attention_server(tp)) / self.model.kv_share(tp)

    def requests(self, tp: int, length: float) -> int:
        """Requests of `length` tokens one group of `tp` GPUs can hold."""
        each = self.model.kv_bytes_per_token * length + self.model.kv_bytes_per_request
        return max(0, int(self.kv_bytes(tp) / each))

    def kv_tokens(self, tp: int, beside: float = 0.0) -> float:
        """KV capacity in tokens of one group whose GPUs hold `beside` bytes more of weights."""
        free = self.attention_usable - self.attention_server(tp) - beside
        return max(0.0, free / self.model.kv_share(tp) / max(self.model.kv_bytes_per_token, 1.0))
