"""What the ranks of an attention server send to MoE servers, and what they get together."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_expertplex.executor.remote_experts import RemoteExperts
from vllm_expertplex.layout import PHASE_DECODE, PHASE_PREFILL

HIDDEN, TOPK, DECODE_TOKENS = 8, 2, 4


class Transport:
    """Answers each token with the sum of its weights times its first id times the token."""

    def __init__(self) -> None:
        self.layer_names: list[str] = []
        self.phases: list[int] = []

    def dispatch(self, x: Any, weights: Any, ids: Any, layer: int, phase: int) -> None:
        assert len(x) == len(weights) == len(ids) > 0
        self.phases.append(phase)
        self._sums = x * (weights.sum(1) * ids[:, 0]).unsqueeze(1).to(x.dtype)

    def combine(self, tokens: int, dtype: torch.dtype) -> torch.Tensor:
        assert len(self._sums) == tokens
        return self._sums.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(st.integers(1, 40), st.integers(1, 8))
def test_ranks_add_up_to_what_one_alone_gets_whatever_the_number_of_tokens(
    dtype: torch.dtype, tokens: int, ranks: int
) -> None:
    x = torch.randn(tokens, HIDDEN).to(dtype)
    weights, ids = torch.rand(tokens, TOPK), torch.randint(1, 16, (tokens, TOPK))

    def layer(rank: int, ranks: int) -> tuple[torch.Tensor, list[int]]:
        peer = Transport()
        experts = RemoteExperts([peer], DECODE_TOKENS, rank, ranks)
        experts.dispatch(x, weights, ids, 0)
        return experts.combine(x), peer.phases

    alone, phases = layer(0, 1)
    assert phases == [PHASE_DECODE if tokens <= DECODE_TOKENS else PHASE_PREFILL]
    parts = [layer(rank, ranks) for rank in range(ranks)]
    assert torch.equal(sum(part for part, _ in parts), alone)  # type: ignore[arg-type]
    assert all(sent in ([], phases) for _, sent in parts), "a step is of one phase on every rank"
