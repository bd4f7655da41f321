"""KV-free mode: attention's keys and values live for one layer of one step.

Owns: laying all layers' KV blocks over each other, and which requests that allows.
Must not know: experts.

vLLM writes a layer's keys and values to its KV cache and attends to them there, layer by layer.
When every prompt is computed whole within one step and answered by one token, nobody reads them
after that layer: all layers can use the same memory, and what it takes is one layer's blocks for
one step's tokens (MoE-Prefill paper, section 4: KV-cache-free mode), or for two where vLLM plans a
step while another runs.
"""

import copy
from typing import Any

from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheLayout,
    KVCacheSpec,
    KVCacheTensor,
    UniformTypeKVCacheSpecs,
    compute_layout_strides,
)

from vllm_expertplex.executor.patches import patch


def blocks_needed(step_tokens: int, sequences: int, block_size: int, steps: int) -> int:
    """Blocks that hold any `steps` steps, as many as are planned at once: each of all `sequences`
    may end within a block; one is vLLM's own.
    """
    return steps * -(-step_tokens // block_size) + sequences + 1


def one_layer(config: KVCacheConfig, layout: KVCacheLayout) -> KVCacheConfig:
    """The same KV cache with all layers at the same addresses.

    Raises ValueError for models that keep state of another kind.
    """
    if config.has_mamba_layers:
        raise ValueError("kv_free: a model with recurrent layers keeps state between steps")
    layers = [layer for tensor in config.kv_cache_tensors for layer in tensor.layers]
    strides = {
        layer: compute_layout_strides(_spec_of(config, layer), config.num_blocks, 1, layout)
        for layer in layers
    }
    # Whichever dimension the layout has outermost.
    size = max(max(layer, block * config.num_blocks) for layer, block, *_ in strides.values())
    shared = copy.deepcopy(config)
    shared.kv_cache_tensors = [
        KVCacheTensor(
            size=size,
            layers=[layer],
            layer_stride=strides[layer][0],
            block_stride=strides[layer][1],
        )
        for layer in layers
    ]
    return shared


def _spec_of(config: KVCacheConfig, layer: str) -> KVCacheSpec:
    (spec,) = (g.kv_cache_spec for g in config.kv_cache_groups if layer in g.layer_names)
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


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
