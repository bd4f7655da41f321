"""The peer of the whole layer: vLLM's own MoE experts, as a chain of kernels.

From quantised tokens and routing to the reduced result, as an operation of the persistent kernel:
permute, grouped GEMM, SiLU * up with quantisation, grouped GEMM, unpermute and weighted sum
(`vllm/model_executor/layers/fused_moe/experts/`). vLLM picks between the two here by the number of
tokens; both are offered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
    RoutingMethodType,
    fp8_w8a8_moe_quant_config,
)
from vllm.model_executor.layers.fused_moe.experts.deep_gemm_moe import DeepGemmExperts
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

from vllm_expertplex.moe_server.apk.buffers import LayerWeights, OperationTemplate

EXPERTS = {"vLLM, DeepGEMM experts": DeepGemmExperts, "vLLM, Triton experts": TritonExperts}


def chain(
    experts: type[Any], op: OperationTemplate, layers: Sequence[LayerWeights]
) -> tuple[Callable[[], None], torch.Tensor]:
    """A call that queues the layers' experts one after the other on the tokens of `op`, and where
    it writes the last one's result, bf16 [T, H].
    """
    shape, tokens = op.shape, op.n_tokens
    h, i, e, k = shape.hidden, shape.intermediate, shape.experts, shape.top_k
    moe = FusedMoEConfig(
        num_experts=e,
        experts_per_token=k,
        hidden_dim=h,
        intermediate_size=i,
        num_local_experts=e,
        num_logical_experts=e,
        activation=MoEActivation.SILU,
        device="cuda",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.bfloat16,
    )
    calls = []
    with set_current_vllm_config(VllmConfig()):
        for layer in layers:
            quant = fp8_w8a8_moe_quant_config(*layer.scales, block_shape=[128, 128])
            made = experts(moe, quant)
            shapes = made.workspace_shapes(tokens, 2 * i, h, k, e, e, None, MoEActivation.SILU)
            workspaces = [torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in shapes[:2]]
            result = torch.empty(tokens, h, dtype=torch.bfloat16, device="cuda")
            calls.append((made, layer, workspaces, result))

    def work() -> None:
        for made, layer, workspaces, result in calls:
            made.apply(
                result,
                op.tokens[:tokens],
                *layer.weights,
                op.expert_weights[:tokens],
                op.expert_ids[:tokens],
                MoEActivation.SILU,
                e,
                None,
                op.token_scales[:tokens],
                None,
                *workspaces,
                None,
                False,
            )

    return work, calls[-1][3]
