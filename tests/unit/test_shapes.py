"""Numbers that both sides of the data path derive from a configuration."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.worker.ubatch_utils import maybe_create_ubatch_slices

from vllm_expertplex.config import ExpertPlexConfig
from vllm_expertplex.layout import Server, SlotOwner
from vllm_expertplex.shapes import decode_step_tokens, slot_owners, slot_shape


@pytest.mark.parametrize(
    ("requests", "captured", "tokens"),
    [
        (100, [1, 64, 104, 256], 104),  # the graph that 100 requests replay
        (64, [1, 64, 104, 256], 64),
        (300, [1, 64, 104, 256], 300),  # no graph is large enough: the step runs as it is
        (100, None, 100),
    ],
)
def test_a_full_decode_step_counts_as_decode_however_it_is_padded(
    requests: int, captured: list[int] | None, tokens: int
) -> None:
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=requests),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=captured),
    )
    assert decode_step_tokens(config) == tokens


def test_only_prefill_servers_have_a_slot_per_microbatch() -> None:
    prefill, decode = [Server("prefill", i) for i in range(2)], Server("decode", 0)
    one = [SlotOwner(server) for server in (*prefill, decode)]
    assert slot_owners(ExpertPlexConfig(layout="2P1D1E")) == one
    second = [SlotOwner(server, 1) for server in prefill]
    assert slot_owners(ExpertPlexConfig(layout="2P1D1E", tbo_tokens=512)) == one + second


@given(st.integers(2, 10_000))
def test_a_second_microbatchs_slot_holds_what_vllm_gives_it(tokens: int) -> None:
    model = SimpleNamespace(
        get_hidden_size=lambda: 256,
        hf_text_config=SimpleNamespace(num_experts_per_tok=2),
        dtype=torch.bfloat16,
    )
    config = SimpleNamespace(
        model_config=model, scheduler_config=SimpleNamespace(max_num_batched_tokens=tokens)
    )
    _, halves = maybe_create_ubatch_slices(True, np.array([tokens]), tokens, 1, 2)
    assert halves is not None
    first, second = (slot_shape(config, half).max_tokens for half in range(2))
    assert first == tokens  # also of steps that are not cut
    assert second == halves[1].num_tokens
