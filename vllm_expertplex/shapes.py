"""Numbers both sides of the data path derive from one vLLM configuration.

Owns: slot shapes, the expert map, the spin budget. Must not know: processes, tensors.
"""

import os
from collections.abc import Sequence
from typing import Any

from vllm_expertplex._comm import Shape
from vllm_expertplex.comm.peer import SlotLayout
from vllm_expertplex.config import ExpertPlexConfig
from vllm_expertplex.layout import PREFILL, ExpertMap, Layout, SlotOwner, senders
from vllm_expertplex.quantization import QuantScheme, quant_scheme

# A process that spins while another needs its core makes both slower, so it only pays when every
# server has a core of its own; then this covers the usual gap between two layers.
_SPIN_US = 200


def slot_shape(vllm_config: Any, microbatch: int = 0) -> Shape:
    """The slots of an attention server: room for the most tokens its scheduler can emit, or for
    the second half of them; for a rank's share of either.
    """
    model_config = vllm_config.model_config
    return Shape(
        _share(vllm_config, vllm_config.scheduler_config.max_num_batched_tokens, microbatch),
        model_config.get_hidden_size(),
        experts_per_token(model_config.hf_text_config),
        model_config.dtype.itemsize,
    )


def gpu_slot(vllm_config: Any, microbatch: int = 0) -> SlotLayout:
    """The slots of an attention server in GPU memory: room for the most tokens of a step, and for
    the largest CUDA graph, which pads steps; or for the second half of them; for a rank's share.
    """
    model_config = vllm_config.model_config
    captured = vllm_config.compilation_config.max_cudagraph_capture_size or 0
    most = max(vllm_config.scheduler_config.max_num_batched_tokens, captured)
    return SlotLayout(
        _share(vllm_config, most, microbatch),
        model_config.get_hidden_size(),
        experts_per_token(model_config.hf_text_config),
        quant_scheme(vllm_config) is QuantScheme.FP8_BLOCK,
    )


def _share(vllm_config: Any, tokens: int, microbatch: int) -> int:
    """Of a step that is cut, vLLM gives the second half the odd token. The first half's slots also
    take steps that are not cut. Each rank sends its share of either.
    """
    sent = -(-tokens // 2) if microbatch else tokens
    return len(share(sent, 0, vllm_config.parallel_config.tensor_parallel_size))


def share(tokens: int, rank: int, ranks: int) -> range:
    """Which of a step's tokens tensor-parallel rank `rank` sends to the MoE servers: runs of equal
    length, of which the last ones may be shorter or empty.
    """
    each = -(-tokens // ranks)
    return range(min(rank * each, tokens), min((rank + 1) * each, tokens))


def decode_step_tokens(vllm_config: Any) -> int:
    """The most tokens a step of nothing but decode has: one per request, padded to the size of a
    CUDA graph where such a step is replayed from one.
    """
    requests = vllm_config.scheduler_config.max_num_seqs
    captured = vllm_config.compilation_config.cudagraph_capture_sizes or []
    return min((size for size in captured if size >= requests), default=requests)


def slot_owners(config: ExpertPlexConfig) -> list[SlotOwner]:
    """Whose the slots of a MoE server are, in their order: one per rank of an attention server, and
    a second one where prefill steps run as two microbatches.
    """
    servers, ranks = config.parsed_layout.attention_servers, range(config.tensor_parallel_size)
    first = [SlotOwner(server, tp_rank=rank) for server in servers for rank in ranks]
    cut = [o for o in first if o.server.role == PREFILL and config.tbo_tokens]
    return [*first, *(SlotOwner(o.server, 1, o.tp_rank) for o in cut)]


def sources(config: ExpertPlexConfig) -> list[SlotOwner]:
    """`senders` of a deployment."""
    return senders(slot_owners(config))


def slot_configs(
    config: ExpertPlexConfig, vllm_configs: Sequence[Any]
) -> list[tuple[SlotOwner, Any]]:
    """The slots' owners in their order, each with its server's configuration; `vllm_configs`: those
    of the attention servers.
    """
    of = dict(zip(config.parsed_layout.attention_servers, vllm_configs, strict=True))
    return [(owner, of[owner.server]) for owner in slot_owners(config)]


def expert_map(vllm_config: Any, layout: Layout) -> ExpertMap:
    """Where each routed expert lives. Raises ValueError when the layout has too many servers."""
    return ExpertMap.contiguous(vllm_config.model_config.get_num_experts(), layout.moe)


def experts_per_token(hf_config: Any) -> int:
    """Top-k of a model. Raises ValueError for a model without routed experts."""
    for name in (
        "num_experts_per_tok",
        "num_experts_per_token",
        "moe_topk",
        "moe_k",
        "top_k_experts",
    ):
        value = getattr(hf_config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    raise ValueError(
        f"{getattr(hf_config, 'architectures', hf_config)} has no routed experts per token in its "
        "config.json; --executor expertplex serves mixture-of-experts models"
    )


def spin_us(config: ExpertPlexConfig) -> int:
    """Busy wait in us before sleeping on a signal."""
    if config.spin_us >= 0:
        return config.spin_us
    return _SPIN_US if len(os.sched_getaffinity(0)) >= _computing(config) else 0


def fair_share(config: ExpertPlexConfig) -> int:
    """`core_share` of the processes of a deployment that compute."""
    return core_share(_computing(config))


def _computing(config: ExpertPlexConfig) -> int:
    """Processes that compute: the MoE servers, and every rank of the attention servers."""
    return len(sources(config)) + config.parsed_layout.moe


def core_share(processes: int) -> int:
    """Cores per process. More threads than that wait for each other at every parallel region."""
    return max(1, len(os.sched_getaffinity(0)) // processes)
