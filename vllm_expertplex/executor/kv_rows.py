"""NIXL's connector with all layers of a KV block in one piece of memory, where that is possible.

Owns: which KV cache layout attention servers prefer. Must not know: how KV travels.

In vLLM's own layouts for NIXL each layer lies by itself, so a prompt is handed over in hundreds of
pieces of 64 KB; in this one in pieces of a megabyte, five times as fast on NVLink. A layout is
preferred only: vLLM takes another where an attention backend cannot read it, and
`VLLM_KV_CACHE_LAYOUT` overrides both (v1/attention/backends/utils.py, resolve_kv_cache_layout).
"""

from typing import cast

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import nixl
from vllm.platforms import current_platform
from vllm.v1.kv_cache_layout import KVCacheLayout


class NixlConnector(nixl.NixlConnector):  # vLLM goes by this name
    """Prefers blocks, then layers, then tokens. Not for MLA; nor for recurrent layers, whose states
    vLLM's worker finds page after page (nixl/base_worker.py, register_kv_caches); nor on CPUs,
    whose attention reads one layout only.
    """

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        model = vllm_config.model_config
        if current_platform.is_cpu() or model is None or model.use_mla or model.is_hybrid:
            return cast("str | None", super().get_required_kvcache_layout(vllm_config))
        return KVCacheLayout.BLNHC.name
