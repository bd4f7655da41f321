"""An attention server's worker on CPU: vLLM's CPU worker over the shared-memory transport.

Owns: what vLLM leaves to do where ranks of one server share memory.
Must not know: how MoE servers compute.
"""

import os
from pathlib import Path
from typing import Any

from vllm.logger import init_logger
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_expertplex.comm.shm import AttentionPeer
from vllm_expertplex.config import ExpertPlexConfig, run_dir
from vllm_expertplex.executor.worker import AttentionWorker
from vllm_expertplex.layout import SlotOwner
from vllm_expertplex.shapes import expert_map, slot_shape, spin_us

logger = init_logger(__name__)


class AttentionCPUWorker(AttentionWorker, CPUWorker):
    """A prefill or decode server's worker."""

    def init_device(self) -> None:
        super().init_device()
        # Every rank has mapped the segments that ranks add up through; vLLM never removes them.
        for segment in Path("/dev/shm").glob(f"{os.environ['VLLM_DIST_IDENT']}-*"):
            segment.unlink(missing_ok=True)

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().execute_model(*args, **kwargs)
        except Exception:
            if self.parallel_config.tensor_parallel_size == 1:
                raise
            # The other ranks wait for this one's part of a sum, without a deadline: only the end of
            # this process tells the engine.
            logger.exception("%s: rank %d ends", self._me.name, self.rank)
            os._exit(1)

    def make_transport(self, owner: SlotOwner, config: ExpertPlexConfig) -> AttentionPeer:
        layout = config.parsed_layout
        return AttentionPeer(
            run_dir(),
            owner,
            layout,
            slot_shape(self.vllm_config, owner.microbatch),
            expert_map(self.vllm_config, layout),
            spin_us(config),
            config.moe_timeout_s,
        )
