"""An attention server's worker on CPU: vLLM's CPU worker over the shared-memory transport."""

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_expertplex.comm.shm import AttentionPeer
from vllm_expertplex.config import ExpertPlexConfig, run_dir
from vllm_expertplex.executor.worker import AttentionWorker
from vllm_expertplex.layout import SlotOwner
from vllm_expertplex.shapes import expert_map, slot_shape, spin_us


class AttentionCPUWorker(AttentionWorker, CPUWorker):
    """A prefill or decode server's worker."""

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
