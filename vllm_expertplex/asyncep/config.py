"""The configuration of `--executor asyncep` and how it reaches every process.

Owns: every option with its default and meaning, and validation.
Must not know: processes, tensors, vLLM.
"""

from typing import Annotated, Any, ClassVar

import msgspec

from vllm_expertplex.config import Positive, settings_in
from vllm_expertplex.layout import Server

ROLE = "asyncep"

# Key of our settings in vLLM's `additional_config`; hashed into its compile cache, so nothing that
# differs between two starts may be in it.
ADDITIONAL_CONFIG_KEY = "asyncep"


class AsyncEPConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of one deployment."""

    gpus: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    """Engines, each on a GPU of its own (on CPU: a process); experts are split between them."""
    gamma: Annotated[float, msgspec.Meta(ge=1, le=100)] = 1.2
    """Margin of the saturation threshold T = t_EP * F * gamma (MoE-Prefill paper, section 4)."""
    max_wait_ms: Annotated[float, msgspec.Meta(ge=0, le=60_000)] = 100.0
    """Longest time a request is held back so that its batch reaches T."""
    offload_layers: Annotated[int, msgspec.Meta(ge=0)] = 0
    """0: all shards resident. n: only those of the next n layers, and all in host memory."""
    kv_free: bool = False
    """Keep no KV: one layer's worth of scratch instead. One-token answers, no prefix reuse."""
    frontend: bool = True
    """Route by prefix and hold requests back until a batch reaches T; off: the least loaded engine,
    at once (for comparisons)."""
    threads: Annotated[int, msgspec.Meta(ge=0)] = 0
    """OpenMP threads of an engine on CPU; 0 takes a fair share of the cores."""
    gather_timeout_s: Positive = 60.0
    """Deadline of one layer's gather; passing it fails the engine that waited."""
    heartbeat_timeout_s: Positive = 60.0
    """An engine that neither answers nor finishes a layer for this long counts as dead."""
    startup_timeout_s: Positive = 1800.0
    """Deadline for all engines to load their weights."""

    @property
    def servers(self) -> list[Server]:
        """The engines in order of rank."""
        return [Server(ROLE, rank) for rank in range(self.gpus)]


class AsyncEPSettings(msgspec.Struct, frozen=True):
    """What `additional_config["asyncep"]` holds: the deployment, and which engine this process is.

    `rank` is -1 in the API server, which is no engine.
    """

    config: AsyncEPConfig
    rank: int

    FRONT: ClassVar[int] = -1

    @property
    def server(self) -> Server:
        return self.config.servers[self.rank]

    def to_additional_config(self) -> dict[str, Any]:
        return {ADDITIONAL_CONFIG_KEY: msgspec.to_builtins(self)}

    @classmethod
    def from_additional_config(cls, additional_config: Any) -> "AsyncEPSettings | None":
        """The settings in vLLM's `additional_config`, or None where AsyncEP is not in use."""
        return settings_in(additional_config, ADDITIONAL_CONFIG_KEY, cls)
