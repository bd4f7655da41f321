"""A stand-in for vLLM's RoutedExperts."""

from types import SimpleNamespace

import torch


class MoeLayer(torch.nn.Module):
    """What ExpertWeights uses of one, holding `mine` of the experts of `parameters`."""

    def __init__(self, index: int, mine: list[int], parameters: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.layer_name = f"layers.{index}"
        self.global_num_experts = len(next(iter(parameters.values())))
        self.local_num_experts = len(mine)
        self.moe_config = SimpleNamespace(num_local_experts=len(mine))
        self.expert_map_manager = SimpleNamespace(local_num_experts=len(mine))
        self.quant_method = SimpleNamespace(moe_quant_config=None)
        self.e_score_correction_bias = None
        for name, tensor in parameters.items():
            self.register_parameter(name, torch.nn.Parameter(tensor[mine], requires_grad=False))
