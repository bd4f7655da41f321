"""True FLOPs of a request, per MoE layer: the unit of load and of the saturation threshold.

Owns: Delta_r of the MoE-Prefill paper (section 4, frontend). Must not know: engines, queues.

The paper splits a request in a prefix of P tokens, M of them cached, and a suffix of S:
Delta_r = C_pfx(P - M) + C_sfx(S, P), each a linear part, the new tokens among themselves and the
new tokens against what was there before. Written out with what is cached (which the paper's C_pfx
leaves out), the two add up to the cost of n = P - M + S new tokens after M: the work does not
depend on where the prompt is cut. The attention part is the difference of two closed forms of the
planner's, which know each attention kind (for GQA: 2 heads head_dim n^2).
"""

from vllm_expertplex.planner.models import ModelSpec


class Flops:
    """FLOPs of prompts of one model, averaged over its MoE layers.

    A pass over all layers gathers one MoE layer per MoE layer, so what else the model has (dense
    layers, for example) counts as time in which to gather. Embeddings and the head are left out:
    the head runs for one token per request.
    """

    def __init__(self, model: ModelSpec) -> None:
        self._attention = model.attention
        self._layers = model.moe_layers
        parameters = (
            model.attention_parameters
            + model.dense_parameters
            + model.moe_layers * model.shared_parameters
            + model.router_parameters
            + model.active_routed_parameters
        )
        self.per_token = 2.0 * parameters / model.moe_layers
        """FLOPs of one token but for its attention to others: C_FFN(1), with the projections."""

    def new(self, tokens: int, cached: int = 0) -> float:
        """FLOPs per MoE layer of `tokens` new tokens after `cached` ones."""
        if tokens < 0 or cached < 0:
            raise ValueError(f"{tokens} new tokens after {cached} cached ones: expected both >= 0")
        core = sum(
            float(a.prefill_flops(cached + tokens) - a.prefill_flops(cached)) * a.layers
            for a in self._attention
        )
        return tokens * self.per_token + core / self._layers

    def tokens_for(self, flops: float) -> float:
        """How many unrelated tokens make that many FLOPs: what short prompts must add up to."""
        return flops / self.per_token
