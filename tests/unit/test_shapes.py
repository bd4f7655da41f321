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
from vllm_expertplex.shapes import decode_step_tokens, share, slot_owners, slot_shape, sources


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


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.booleans())
def test_every_rank_and_microbatch_has_a_slot_and_every_rank_is_a_source(
    prefill: int, decode: int, ranks: int, cut: bool
) -> None:
    layout = f"{prefill}P{decode}D1E"
    config = ExpertPlexConfig(layout=layout, tensor_parallel_size=ranks, tbo_tokens=int(cut))
    owners, senders = slot_owners(config), sources(config)
    assert len({owner.name for owner in owners}) == len(owners)
    assert len(senders) == len(set(senders)) == (prefill + decode) * ranks
    for sender in senders:
        mine = [owner for owner in owners if owner.source == sender]
        assert len(mine) == 1 + (cut and sender.server.role == "prefill")


@given(st.integers(1, 10_000), st.integers(1, 8))
def test_ranks_send_each_token_once_and_no_more_than_their_slots_hold(
    tokens: int, ranks: int
) -> None:
    shares = [share(tokens, rank, ranks) for rank in range(ranks)]
    assert [token for mine in shares for token in mine] == list(range(tokens))
    assert max(map(len, shares)) == slot_shape(vllm_config(tokens, ranks)).max_tokens


@given(st.integers(2, 10_000))
def test_a_second_microbatchs_slot_holds_what_vllm_gives_it(tokens: int) -> None:
    config = vllm_config(tokens)
    _, halves = maybe_create_ubatch_slices(True, np.array([tokens]), tokens, 1, 2)
    assert halves is not None
    first, second = (slot_shape(config, half).max_tokens for half in range(2))
    assert first == tokens  # also of steps that are not cut
    assert second == halves[1].num_tokens


def vllm_config(tokens: int, ranks: int = 1) -> SimpleNamespace:
    """Of servers whose steps have at most `tokens` tokens."""
    model = SimpleNamespace(
        get_hidden_size=lambda: 256,
        hf_text_config=SimpleNamespace(num_experts_per_tok=2),
        dtype=torch.bfloat16,
    )
    return SimpleNamespace(
        model_config=model,
        scheduler_config=SimpleNamespace(max_num_batched_tokens=tokens),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
    )
