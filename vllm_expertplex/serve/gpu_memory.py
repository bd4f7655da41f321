"""How servers divide the memory of their GPUs.

Owns: what a MoE server needs, what that leaves to each attention server. Must not know: CUDA, SMs.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from vllm_expertplex.layout import Layout, Server
from vllm_expertplex.quantization import QuantScheme, quant_scheme
from vllm_expertplex.serve.placement import Place
from vllm_expertplex.shapes import expert_map

# Of a MoE server, beside its experts: slots and buffers for steps of thousands of tokens, and what
# CUDA takes for each process.
_BESIDE_BYTES = 4 << 30


def moe_bytes(vllm_config: Any, layout: Layout) -> int:
    """GPU memory that the largest MoE server of a layout needs."""
    model = vllm_config.model_config
    text = model.hf_text_config
    block_fp8 = quant_scheme(vllm_config) is QuantScheme.FP8_BLOCK  # else all is model dtype
    intermediate = getattr(text, "moe_intermediate_size", None) or text.intermediate_size
    expert = 3 * model.get_hidden_size() * intermediate * (1 if block_fp8 else model.dtype.itemsize)
    layers = text.num_hidden_layers - getattr(text, "first_k_dense_replace", 0)
    split = expert_map(vllm_config, layout)
    most = max(len(split.local_experts(moe.rank)) for moe in layout.moe_servers)
    return most * layers * expert + _BESIDE_BYTES


def attention_shares(
    layout: Layout,
    places: Mapping[str, Place],
    moe_part: float,
    utilization: float,
) -> dict[str, float]:
    """Attention server name -> the part of each of its GPUs that it may take: of `utilization`,
    what MoE servers there leave, each of which needs `moe_part`, in equal shares.

    Raises ValueError where they leave nothing.
    """

    def on(servers: Iterable[Server]) -> Counter[str]:
        return Counter(gpu for server in servers for gpu in places[server.name].gpus)

    experts, attention = on(layout.moe_servers), on(layout.attention_servers)
    left = {gpu: (utilization - experts[gpu] * moe_part) / n for gpu, n in attention.items()}
    for gpu, part in left.items():
        if part <= 0:
            raise ValueError(
                f"GPU {gpu} is to hold {experts[gpu]} of the MoE servers, which need "
                f"{moe_part:.0%} of its memory each; that leaves attention servers nothing of "
                f"--gpu-memory-utilization {utilization:g}: raise it, or use more GPUs"
            )
    return {s.name: min(left[g] for g in places[s.name].gpus) for s in layout.attention_servers}
