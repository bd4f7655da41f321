"""What a decode server's scheduler does with a first token that prefill has sampled."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_expertplex.executor.scheduler import _FirstToken
from vllm_expertplex.executor.scheduler_keys import FIRST_TOKEN


class VllmScheduler:
    """Looks at most at all tokens but the last, as vLLM's KV cache manager does."""

    def __init__(self) -> None:
        self.kv_cache_manager = SimpleNamespace(get_computed_blocks=self._look_up)

    @staticmethod
    def _look_up(request: Any) -> int:
        return min(request.cached, request.num_tokens - 1) // 16 * 16


class Scheduler(_FirstToken, VllmScheduler):
    pass


@pytest.mark.parametrize(
    ("fetched", "prompt", "outputs", "found"),
    [
        (True, 32, 1, 16),  # the block that the prompt fills comes from prefill, too
        (True, 33, 1, 32),
        (True, 32, 2, 32),  # preempted: it computes everything itself
        (False, 32, 1, 32),
    ],
)
def test_the_last_block_of_a_prompt_is_the_one_that_prefill_computed(
    fetched: bool, prompt: int, outputs: int, found: int
) -> None:
    request = SimpleNamespace(
        cached=64,
        num_prompt_tokens=prompt,
        num_output_tokens=outputs,
        num_tokens=prompt + outputs,
        kv_transfer_params={FIRST_TOKEN: 7} if fetched else None,
    )
    assert Scheduler().kv_cache_manager.get_computed_blocks(request) == found
