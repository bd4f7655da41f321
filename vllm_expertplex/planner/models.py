"""What the planner knows of a MoE model: shapes, parameter counts and bytes.

Owns: `ModelSpec` and its attention kinds. Must not know: hardware, layouts, where a description
came from (`model_configs.py`).
"""

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

Number = float | NDArray[Any]

GQA, MLA, LINEAR = "gqa", "mla", "linear"


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """`layers` attention layers of one kind.

    `window` limits the keys a query reads. `index_topk` is sparse attention behind an indexer of
    `index_heads` x `index_dim`. `compression` c keeps one KV entry per c tokens beside the window.
    """

    layers: int
    kind: str = GQA
    heads: int
    kv_heads: int = 0
    head_dim: int = 0
    q_lora: int = 0
    kv_lora: int = 0
    rope_dim: int = 0
    nope_dim: int = 0
    v_dim: int = 0
    window: int = 0
    index_topk: int = 0
    index_heads: int = 0
    index_dim: int = 0
    compression: int = 1
    shared_kv: bool = False
    gated: bool = False
    o_lora: int = 0

    def parameters(self, hidden: int) -> float:
        """Projection weights of one layer (norms left out)."""
        index = self.index_heads * (
            self.index_dim * (self.q_lora or hidden) + hidden
        ) + self.index_dim * hidden * bool(self.index_heads)
        if self.kind == MLA:
            qk = self.nope_dim + self.rope_dim
            q = (
                hidden * self.q_lora + self.q_lora * self.heads * qk
                if self.q_lora
                else hidden * self.heads * qk
            )
            kv = hidden * (self.kv_lora + self.rope_dim)
            kv += self.kv_lora * self.heads * (self.nope_dim + self.v_dim)
            return q + kv + self.heads * self.v_dim * hidden + index
        inner = self.heads * self.head_dim
        kv = hidden * self.kv_heads * self.head_dim * (1 if self.shared_kv else 2)
        if (
            self.kind == LINEAR
        ):  # gated delta net: q and k of `kv_heads`, v, z and output of `heads`
            return kv + 3 * hidden * inner
        q = hidden * self.q_lora + self.q_lora * inner if self.q_lora else hidden * inner
        out = self.o_lora * hidden * 8 + inner * self.o_lora if self.o_lora else inner * hidden
        return q + kv + out + hidden * inner * self.gated + index

    def kv_bytes(self, element: float) -> float:
        """KV cache bytes of one more token in one layer; 0 once a window is all there is."""
        if self.kind == LINEAR or (self.window and self.compression == 1):
            return 0.0
        index = (self.index_dim + 4) * bool(self.index_topk)  # FP8 key and its scale
        if self.kind == MLA:
            return (self.kv_lora + self.rope_dim) * element + index
        width = self.kv_heads * self.head_dim * (1 if self.shared_kv else 2)
        return (width * element + index) / self.compression

    def fixed_bytes(self, element: float) -> float:
        """Per-request bytes of one layer whatever its length: a window, or a recurrent state."""
        if self.kind == LINEAR:
            return self.heads * self.head_dim * self.head_dim * 4.0
        return self.window * self.kv_heads * self.head_dim * 2.0 * element

    def read_bytes(self, length: Number, element: float) -> Number:
        """KV bytes one decode query reads in one layer at context `length` (array or float)."""
        if self.kind == LINEAR:
            return self.fixed_bytes(element) + 0.0 * length
        width = (
            self.kv_lora + self.rope_dim
            if self.kind == MLA
            else self.kv_heads * self.head_dim * (1 if self.shared_kv else 2)
        ) * element
        entries = length / self.compression
        index = (self.index_dim + 4) * entries * bool(self.index_topk)
        if self.index_topk:
            entries = np.minimum(entries, self.index_topk)
        elif self.window and self.compression == 1:
            return width * np.minimum(length, self.window)
        return width * (entries + np.minimum(length, self.window)) + index

    def prefill_flops(self, length: Number) -> Number:
        """FLOPs of the attention core of one layer over one prompt of `length` tokens."""
        if self.kind == LINEAR:
            return 6.0 * self.heads * self.head_dim * self.head_dim * length
        pairs = length * length / 2 / self.compression
        index = 2.0 * self.index_heads * self.index_dim * pairs * bool(self.index_topk)
        limit = self.index_topk or (self.window if self.compression == 1 else 0)
        if limit:
            inside = np.minimum(length, limit)
            pairs = inside * inside / 2 + (length - inside) * inside
        if self.window and self.compression > 1:
            pairs = pairs + np.minimum(length, self.window) * length
        if self.kind == MLA and self.index_topk:  # sparse kernels attend in latent space
            width = 2 * self.kv_lora + self.rope_dim
        elif self.kind == MLA:
            width = self.nope_dim + self.rope_dim + self.v_dim
        else:
            width = 2 * self.head_dim
        return 2.0 * self.heads * width * pairs + index

    def decode_flops(self, length: Number) -> Number:
        """FLOPs of the attention core of one layer for one query at context `length`."""
        if self.kind == LINEAR:
            return 6.0 * self.heads * self.head_dim * self.head_dim + 0.0 * length
        entries = length / self.compression
        index = 2.0 * self.index_heads * self.index_dim * entries * bool(self.index_topk)
        if self.index_topk:
            entries = np.minimum(entries, self.index_topk)
        elif self.window and self.compression == 1:
            entries = np.minimum(entries, self.window)
        width = 2 * self.kv_lora + self.rope_dim if self.kind == MLA else 2 * self.head_dim
        return 2.0 * self.heads * width * entries + index


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A MoE model. `*_bytes` are bytes per parameter, quantisation scales included."""

    name: str
    hidden: int
    vocab: int
    tied: bool = False
    attention: tuple[Attention, ...]
    moe_layers: int
    dense_layers: int = 0
    dense_intermediate: int = 0
    experts: int
    top_k: int
    expert_intermediate: int
    shared_intermediate: int = 0
    mtp_layers: int = 0
    expert_bytes: float = 2.0
    linear_bytes: float = 2.0
    kv_element_bytes: float = 2.0
    source: str = ""

    @property
    def layers(self) -> int:
        return sum(a.layers for a in self.attention)

    @property
    def expert_parameters(self) -> float:
        """Weights of one routed expert: gate, up and down."""
        return 3.0 * self.hidden * self.expert_intermediate

    @property
    def expert_weight_bytes(self) -> float:
        """Bytes of one routed expert of one layer."""
        return self.expert_parameters * self.expert_bytes

    @property
    def routed_bytes(self) -> float:
        """Bytes of every routed expert of every served layer (no MTP layer)."""
        return self.expert_weight_bytes * self.experts * self.moe_layers

    @property
    def shared_parameters(self) -> float:
        """Shared-expert weights of one MoE layer."""
        return 3.0 * self.hidden * self.shared_intermediate

    @property
    def attention_parameters(self) -> float:
        """Attention projections of all layers."""
        return sum(a.layers * a.parameters(self.hidden) for a in self.attention)

    @property
    def dense_parameters(self) -> float:
        """FFN weights of all dense layers."""
        return self.dense_layers * 3.0 * self.hidden * self.dense_intermediate

    @property
    def embedding_parameters(self) -> float:
        return self.vocab * self.hidden * (1.0 if self.tied else 2.0)

    @property
    def linear_parameters(self) -> float:
        """Quantisable weights of an attention server: attention, dense layers, shared experts."""
        shared = self.moe_layers * self.shared_parameters
        return self.attention_parameters + self.dense_parameters + shared

    @property
    def router_parameters(self) -> float:
        return float(self.moe_layers * self.hidden * self.experts)

    @property
    def attention_server_bytes(self) -> float:
        """Everything that is not a routed expert; embeddings, head and router in 16 bit."""
        rest = 2.0 * (self.embedding_parameters + self.router_parameters)
        return self.linear_parameters * self.linear_bytes + rest

    @property
    def parameters(self) -> float:
        """Parameters of the served model (no MTP layer)."""
        routed = self.expert_parameters * self.experts * self.moe_layers
        return routed + self.linear_parameters + self.router_parameters + self.embedding_parameters

    @property
    def active_routed_parameters(self) -> float:
        """Routed parameters one token uses."""
        return self.expert_parameters * self.top_k * self.moe_layers

    @property
    def checkpoint_bytes(self) -> float:
        """Expected size of the checkpoint, with its MTP layers."""
        mtp = self.mtp_layers * (
            self.experts * self.expert_weight_bytes
            + (self.attention_parameters / self.layers + self.shared_parameters) * self.linear_bytes
            + 2.0 * (2 * self.hidden * self.hidden + self.hidden * self.experts)
        )
        return self.routed_bytes + self.attention_server_bytes + mtp

    @property
    def kv_bytes_per_token(self) -> float:
        """KV cache bytes one token adds, all layers."""
        return sum(a.layers * a.kv_bytes(self.kv_element_bytes) for a in self.attention)

    @property
    def kv_bytes_per_request(self) -> float:
        """KV or state bytes a request holds whatever its length (windows, recurrent states)."""
        return sum(a.layers * a.fixed_bytes(self.kv_element_bytes) for a in self.attention)

    def kv_share(self, tp: int) -> float:
        """The part of a request's KV that each of `tp` tensor-parallel GPUs holds.

        Latent KV (MLA) is replicated; GQA splits down to one head.
        """
        total = self.kv_bytes_per_token or 1.0
        share = 0.0
        for a in self.attention:
            part = 1.0 if a.kind == MLA else max(1 / tp, 1 / max(a.kv_heads, 1))
            share += a.layers * a.kv_bytes(self.kv_element_bytes) / total * part
        return share or 1.0 / tp
