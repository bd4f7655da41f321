"""KV-free mode: layers share memory, each seen in its usual shape; there is room for any step."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheTensor,
    compute_layout_strides,
)
from vllm.v1.worker.utils import allocate_kv_cache

from vllm_expertplex.asyncep.kv_free import blocks_needed, one_layer, refuse_generation

_LAYERS, _BLOCKS = ["a", "b", "c"], 5


def _config(layout: KVCacheLayout) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32)
    outermost = len(_LAYERS) * spec.page_size_bytes if layout.is_block_outermost else None
    strides = compute_layout_strides(
        spec, _BLOCKS, len(_LAYERS), layout, fixed_strides=(None, outermost, None, None, None)
    )
    tensor = KVCacheTensor(
        size=len(_LAYERS) * _BLOCKS * spec.page_size_bytes,
        layers=_LAYERS,
        layer_stride=strides[0],
        block_stride=strides[1],
    )
    return KVCacheConfig(_BLOCKS, [tensor], [KVCacheGroupSpec(_LAYERS, spec)])


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
def test_all_layers_are_seen_at_the_same_place(layout: KVCacheLayout) -> None:
    usual = _config(layout)
    ours = one_layer(usual, layout)
    views = allocate_kv_cache(ours, torch.device("cpu"), layout)
    assert views.keys() == set(_LAYERS)
    shape = allocate_kv_cache(usual, torch.device("cpu"), layout)["b"].shape
    assert {view.shape for view in views.values()} == {shape}
    assert len({view.data_ptr() for view in views.values()}) == 1
    assert views["a"].untyped_storage().nbytes() * 3 == usual.kv_cache_tensors[0].size
    numbers = torch.arange(views["a"].numel()).float().view(shape)
    views["a"].copy_(numbers)
    assert torch.equal(views["c"], numbers)  # and no two blocks are the same


_STEP = st.lists(st.integers(1, 500), min_size=1, max_size=32)


@given(st.integers(1, 64), st.lists(_STEP, min_size=1, max_size=2))
def test_steps_that_are_planned_at_once_find_their_blocks(
    block_size: int, steps: list[list[int]]
) -> None:
    prompts = [tokens for step in steps for tokens in step]
    needed = sum(-(-tokens // block_size) for tokens in prompts)
    largest = max(sum(step) for step in steps)
    assert blocks_needed(largest, len(prompts), block_size, len(steps)) > needed


def test_more_than_one_token_is_refused_before_vllm_knows_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm_expertplex.executor import patches

    monkeypatch.setattr(patches, "_applied", set())
    monkeypatch.setattr(InputProcessor, "_validate_params", InputProcessor._validate_params)
    refuse_generation()
    with pytest.raises(VLLMValidationError, match="max_tokens = 2, but this server runs in KV-f"):
        InputProcessor._validate_params(None, SamplingParams(max_tokens=2), ())  # type: ignore[arg-type]
