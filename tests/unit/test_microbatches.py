"""What a runner is told so that the halves of a step are computed apart."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_expertplex.executor.microbatches import building_each
from vllm_expertplex.executor.patches import PatchError


class Builder:
    """As vLLM's FlashAttention builder: metadata of before may serve again."""

    supports_update_block_table = True

    def build(self, tokens: int) -> dict[str, int]:
        return {"tokens": tokens}


def metadata_of_halves(runner: Any, halves: tuple[int, int]) -> list[dict[str, int]]:
    """The rule of GPUModelRunner._build_attention_metadata, which keeps metadata by group."""
    kept: dict[int, dict[str, int]] = {}
    found = []
    for index, tokens in enumerate(halves):
        builder = runner.attn_groups[0][0].metadata_builders[index]
        if 0 in kept and builder.supports_update_block_table:
            found.append(kept[0])
            continue
        found.append(builder.build(tokens))
        kept[0] = found[-1]
    return found


def test_vllm_asks_the_builder_whether_metadata_may_serve_again() -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    rule = inspect.getsource(GPUModelRunner._build_attention_metadata)
    assert "and builder.supports_update_block_table" in rule
    assert "attn_group.get_metadata_builder(ubid or 0)" in rule


def test_each_half_gets_metadata_of_its_own() -> None:
    runner = SimpleNamespace(attn_groups=[])

    def create(*, builders: int) -> None:
        group = SimpleNamespace(metadata_builders=[Builder() for _ in range(builders)])
        runner.attn_groups = [[group]]

    create(builders=2)
    assert metadata_of_halves(runner, (2, 3)) == [{"tokens": 2}] * 2  # what is to be prevented
    building_each(runner, create)(builders=2)
    assert metadata_of_halves(runner, (2, 3)) == [{"tokens": 2}, {"tokens": 3}]


def test_builders_that_are_not_asked_are_refused() -> None:
    """A new attribute would change nothing: halves would share metadata, unnoticed."""
    group = SimpleNamespace(metadata_builders=[object()])
    runner = SimpleNamespace(attn_groups=[[group]])
    with pytest.raises(PatchError, match=r"object has no supports_update_block_table; install"):
        building_each(runner, lambda: None)()
