"""The saturation threshold T: how much work hides the gather of a layer.

Owns: the formula, from what engines measured. Must not know: who uses it.
"""

from collections.abc import Sequence

import msgspec

from vllm_expertplex.asyncep.flops import Flops
from vllm_expertplex.asyncep.speed import Speed


class Threshold(msgspec.Struct, frozen=True):
    """T = t_EP * F * gamma (MoE-Prefill paper, section 4).

    gather_s: t_EP, seconds to gather a layer. flops_per_s: F, what an engine reaches in a forward
    pass, not its peak: compared with a peak, T would be as many times too small as the peak is
    missed.
    """

    gather_s: float
    flops_per_s: float
    gamma: float

    @classmethod
    def of(
        cls, speeds: Sequence[Speed], flops: Flops, moe_layers: int, gamma: float
    ) -> "Threshold":
        """From the slowest gather and the slowest forward pass of all engines."""
        gather_s = max(speed.gather_s for speed in speeds)
        rates = [
            flops.new(1) * speed.tokens * moe_layers / speed.pass_s
            for speed in speeds
            if speed.pass_s > 0
        ]
        return cls(gather_s, min(rates, default=0.0), gamma)

    @property
    def flops(self) -> float:
        """T in FLOPs per MoE layer; 0 when nothing is gathered."""
        return self.gather_s * self.flops_per_s * self.gamma
