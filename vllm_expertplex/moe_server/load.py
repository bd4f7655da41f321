"""Loading a MoE server's experts in a process that has nothing of vLLM set up.

Owns: what vLLM's model classes expect around them. Must not know: transports, backends.
"""

import tempfile
from collections.abc import Sequence

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

from vllm_expertplex.moe_server.backend import ExpertWeights
from vllm_expertplex.moe_server.store import load_experts


def load_layers(vllm_config: VllmConfig, local_experts: Sequence[int]) -> dict[str, ExpertWeights]:
    """The experts with the given global ids, of every MoE layer by name, on vLLM's device.

    Raises ValueError as `load_experts` does.
    """
    # vLLM's model classes ask for process groups; this one has only this process in it.
    with tempfile.TemporaryDirectory() as scratch, set_current_vllm_config(vllm_config):
        init_distributed_environment(1, 0, f"file://{scratch}/store", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        return load_experts(vllm_config, local_experts)
