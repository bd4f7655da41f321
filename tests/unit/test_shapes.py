"""Numbers that both sides of the data path derive from a configuration."""

from types import SimpleNamespace

import pytest

from vllm_expertplex.config import ExpertPlexConfig
from vllm_expertplex.layout import Server, SlotOwner
from vllm_expertplex.shapes import decode_step_tokens, slot_owners


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
