"""What an attention server's MoE layers need from a transport, whatever carries the bytes."""

from typing import Protocol

import torch


class Transport(Protocol):
    """One operation at a time: `dispatch`, then `combine`. `layer_names` serve messages."""

    layer_names: list[str]

    def dispatch(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        layer: int,
        phase: int,
    ) -> None:
        """Push x [n, hidden] with topk_weights [n, topk] fp32 and topk_ids [n, topk] int32."""

    def combine(self, tokens: int, dtype: torch.dtype) -> torch.Tensor:
        """The sum [tokens, hidden] of what the MoE servers computed, rounded once."""
