"""The routed experts of an attention server: no weights, only dispatch and combine.

Owns: the stand-in for vLLM's RoutedExperts layer and its custom ops.
Must not know: what MoE servers do, how bytes travel.

vLLM's MoE runner keeps routing (any scoring, bias, groups, scaling) and hands over its shared
experts, which run here between dispatch and combine: single-batch overlap.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_expertplex.comm.transport import Transport
from vllm_expertplex.executor import turns
from vllm_expertplex.layout import PHASE_DECODE, PHASE_PREFILL
from vllm_expertplex.shapes import share


class RemoteExperts:
    """The connection that all MoE layers of this process share.

    `peers`: a transport per microbatch of a step that is cut, so that each can have an operation
    in flight. Steps of more than `decode_tokens` tokens count as prefill on the MoE servers: a
    decode server that recomputes a preempted request sends prefill-shaped work.

    All tensor-parallel ranks have the same tokens. Each sends its share of them and leaves the
    others' sums at zero: vLLM adds up what the ranks have of a MoE layer.
    """

    def __init__(
        self, peers: Sequence[Transport], decode_tokens: int, tp_rank: int = 0, tp_size: int = 1
    ) -> None:
        self._peers = peers
        self._decode_tokens = decode_tokens
        self._tp_rank, self._tp_size = tp_rank, tp_size

    def _mine(self, tokens: int) -> slice:
        mine = share(tokens, self._tp_rank, self._tp_size)
        return slice(mine.start, mine.stop)

    def dispatch(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, layer: int
    ) -> None:
        phase = PHASE_DECODE if x.shape[0] <= self._decode_tokens else PHASE_PREFILL
        if self._tp_size > 1:
            mine = self._mine(x.shape[0])
            if mine.start == mine.stop:
                return
            x, weights, ids = x[mine], weights[mine], ids[mine]
        self._peers[turns.number()].dispatch(x, weights, ids, layer, phase)

    def combine(self, x: torch.Tensor) -> torch.Tensor:
        turns.give_way()  # the other microbatch's attention, meanwhile
        peer = self._peers[turns.number()]
        if self._tp_size == 1:
            return peer.combine(x.shape[0], x.dtype)
        out, mine = torch.zeros_like(x), self._mine(x.shape[0])
        if n := mine.stop - mine.start:
            out[mine] = peer.combine(n, x.dtype)
        return out


_connection: RemoteExperts | None = None


def connect(connection: RemoteExperts) -> None:
    """Set the connection of this process; before the model runs."""
    global _connection
    _connection = connection


def connection() -> RemoteExperts:
    if _connection is None:
        raise RuntimeError("the attention server is not connected to its MoE servers")
    return _connection


# Traced models must not look inside, so both halves are custom ops there. The token returned by
# dispatch orders them; eager models call the Python functions and save the dispatcher's cost.
def _dispatch(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer: int
) -> torch.Tensor:
    connection().dispatch(x, topk_weights, topk_ids, layer)
    return torch.empty(0)


def _dispatch_fake(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer: int
) -> torch.Tensor:
    return torch.empty(0)


def _combine(x: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    return connection().combine(x)


def _combine_fake(x: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


direct_register_custom_op("expertplex_dispatch", _dispatch, fake_impl=_dispatch_fake)
direct_register_custom_op("expertplex_combine", _combine, fake_impl=_combine_fake)


class RemoteExpertsMethod(FusedMoEMethodBase):
    """Computes a layer's experts elsewhere."""

    supports_internal_mk = True  # no dispatch by vLLM itself
    mk_can_overlap_shared_experts = True  # the runner hands over the shared experts
    is_monolithic = False  # vLLM's router stays here
    topk_indices_dtype = torch.int32

    def maybe_roundup_sizes(self, hidden: int, intermediate: int, *_: Any) -> tuple[int, int]:
        return hidden, intermediate

    def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def process_weights_after_loading(self, layer: Any) -> None:
        pass

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        return FUSED_MOE_UNQUANTIZED_CONFIG

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        if torch.compiler.is_compiling():
            token = torch.ops.vllm.expertplex_dispatch(x, topk_weights, topk_ids, layer.moe_index)
        else:
            token = None
            connection().dispatch(x, topk_weights, topk_ids, layer.moe_index)
        if shared_experts is not None:
            shared_experts(shared_experts_input, SharedExpertsOrder.MK_INTERNAL_OVERLAPPED)
        if token is None:
            return connection().combine(x)
        return torch.ops.vllm.expertplex_combine(x, token)


def remote_routed_experts(layer_names: list[str]) -> type:
    """A RoutedExperts class without weights; appends the name of each layer it builds."""

    class RemoteRoutedExperts(RoutedExperts):  # type: ignore[misc]
        def __init__(self, layer_name: str, *args: Any, **kwargs: Any) -> None:
            super().__init__(layer_name, *args, **kwargs)
            self.moe_index = len(layer_names)
            layer_names.append(layer_name)

        def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
            return RemoteExpertsMethod(moe_config)

        def load_weights(self, weights: Any) -> list[str]:
            for _ in weights:
                pass
            return []

    return RemoteRoutedExperts
