"""KV-free mode: attention's keys and values live for one layer of one step.

Owns: laying all layers' KV blocks over each other, and which requests that allows.
Must not know: experts.

vLLM writes a layer's keys and values to its KV cache and attends to them there, layer by layer.
When every prompt is computed whole within one step and answered by one token, nobody reads them
after that layer: all layers can use the same memory, and what it takes is one layer's blocks for
one step's tokens (MoE-Prefill paper, section 4: KV-cache-free mode).
"""

import copy
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_expertplex.executor.patches import patch


def blocks_needed(step_tokens: int, sequences: int, block_size: int) -> int:
    """Blocks that hold any one step: each sequence may end within a block; one is vLLM's own."""
    return -(-step_tokens // block_size) + sequences + 1


def one_layer(config: KVCacheConfig) -> KVCacheConfig:
    """The same KV cache with all layers at the same addresses.

    Raises ValueError for models that keep state of another kind.
    """
    if config.has_mamba_layers:
        raise ValueError("kv_free: a model with recurrent layers keeps state between steps")
    pages = [min(t.layer_stride, t.block_stride) for t in config.kv_cache_tensors]
    shared = copy.deepcopy(config)
    for tensor, page in zip(shared.kv_cache_tensors, pages, strict=True):
        tensor.layer_stride, tensor.offset = 0, 0
        tensor.block_stride = page
        tensor.size = max(pages) * config.num_blocks
    return shared


def refuse_generation() -> None:
    """Refuse, before vLLM knows them, requests for more than one token."""
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor

    def wrap(original: Any) -> Any:
        def _validate_params(self: Any, params: Any, supported_tasks: Any) -> Any:
            if isinstance(params, SamplingParams) and params.max_tokens != 1:
                raise VLLMValidationError(
                    f"max_tokens = {params.max_tokens}, but this server runs in KV-free mode "
                    "(kv_free in --asyncep-config) and answers with one token: ask with "
                    "max_tokens = 1",
                    parameter="max_tokens",
                    value=params.max_tokens,
                )
            return original(self, params, supported_tasks)

        return _validate_params

    patch(
        "kv-free-requests", InputProcessor, "_validate_params", "self params supported_tasks", wrap
    )
