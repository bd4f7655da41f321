"""An attention server's worker on a GPU: vLLM's GPU worker over peer memory.

Owns: noticing a MoE server that missed its deadline, and a KV cache budget where servers share a
GPU. Must not know: how MoE servers compute.
"""

from collections.abc import Callable
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.logger import init_logger
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker

from vllm_expertplex.comm.peer_transport import PeerTransport
from vllm_expertplex.config import ExpertPlexConfig, run_dir
from vllm_expertplex.executor.worker import AttentionWorker
from vllm_expertplex.layout import SlotOwner
from vllm_expertplex.serve.placement import read_place
from vllm_expertplex.shapes import expert_map, gpu_slot

logger = init_logger(__name__)

# Of a process that shares its GPU: what torch's allocator does not see (context, kernels, NIXL),
# and CUDA graphs.
_UNSEEN_BYTES = 2 << 30


class AttentionGPUWorker(AttentionWorker, Worker):
    """A prefill or decode server's worker."""

    def make_transport(self, owner: SlotOwner, config: ExpertPlexConfig) -> PeerTransport:
        layout = config.parsed_layout
        return PeerTransport(
            run_dir(),
            owner,
            layout,
            gpu_slot(self.vllm_config, owner.microbatch),
            expert_map(self.vllm_config, layout),
            config.moe_timeout_s,
        )

    def connect_transports(self, config: ExpertPlexConfig) -> None:
        for transport in self._transports:
            transport.connect(config.startup_timeout_s)

    @torch.inference_mode()
    def determine_available_memory(self) -> int:
        """Bytes for the KV cache. vLLM measures how much memory of the GPU is gone, and would count
        what the servers beside this one take meanwhile: here each counts only its own.
        """
        place = read_place(run_dir(), self._me)
        if place is None or place.servers == 1 or self.cache_config.kv_cache_memory_bytes:
            return super().determine_available_memory()
        torch.cuda.reset_peak_memory_stats()
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.profile_run(randomize_inputs=self.randomize_dummy_inputs)
        peak = torch.cuda.max_memory_allocated()
        left = int(self.requested_memory) - peak - _UNSEEN_BYTES
        logger.info(
            "%s shares its GPU with %d servers: %.1f GiB for KV of %.1f GiB",
            self._me.name,
            place.servers - 1,
            left / 2**30,
            self.requested_memory / 2**30,
        )
        if left <= 0:
            raise ValueError(
                f"{self._me.name} may take {self.requested_memory / 2**30:.1f} GiB of the GPU that "
                f"{place.servers} servers share, and needs {peak / 2**30:.1f} GiB for the model "
                f"and {_UNSEEN_BYTES / 2**30:.0f} GiB beside it before any KV cache: raise "
                "--gpu-memory-utilization, or use more GPUs"
            )
        return left

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        self._check()
        return self._checked(super().execute_model(*args, **kwargs))

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        return self._checked(super().sample_tokens(*args, **kwargs))

    def _checked(self, output: Any) -> Any:
        """No token of a step whose MoE layers were not all answered may leave the server."""
        if isinstance(output, AsyncModelRunnerOutput):
            return _CheckedOutput(output, self._check)
        if output is not None:
            self._check()
        return output

    def _check(self) -> None:
        for transport in self._transports:
            transport.check()


class _CheckedOutput(AsyncModelRunnerOutput):
    """An output that is copied to the host meanwhile; its step is over once it is there."""

    def __init__(self, output: AsyncModelRunnerOutput, check: Callable[[], None]) -> None:
        self._output, self._check = output, check

    def get_output(self) -> Any:
        output = self._output.get_output()
        self._check()
        return output
