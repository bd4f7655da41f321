"""The worker of an attention server on CPU: vLLM's worker with experts elsewhere.

Owns: connecting to the MoE servers and loading a model without routed experts.
Must not know: how MoE servers compute.
"""

import time
from typing import Any

import torch
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_expertplex.comm.shm import AttentionPeer
from vllm_expertplex.config import ExpertPlexConfig, ServerSettings, run_dir
from vllm_expertplex.executor.loader import is_expert_weight
from vllm_expertplex.executor.patches import apply_attention_patches
from vllm_expertplex.executor.remote_experts import RemoteExperts, connect, remote_routed_experts
from vllm_expertplex.executor.seam import replaced_routed_experts
from vllm_expertplex.layout import DECODE, Server
from vllm_expertplex.serve.records import ServerRecord, read_record, write_record
from vllm_expertplex.shapes import expert_map, slot_shape, spin_us


class AttentionCPUWorker(CPUWorker):
    """A prefill or decode server's worker."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        apply_attention_patches()
        super().__init__(*args, **kwargs)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        settings = ServerSettings.from_additional_config(self.vllm_config.additional_config)
        assert settings is not None  # the executor checked
        me = Server(settings.role, settings.rank)
        layout = settings.config.parsed_layout
        peer = AttentionPeer(
            run_dir(),
            me,
            layout,
            slot_shape(self.vllm_config),
            expert_map(self.vllm_config, layout),
            spin_us(settings.config),
            settings.config.moe_timeout_s,
        )
        decode_tokens = self.vllm_config.scheduler_config.max_num_seqs if me.role == DECODE else 0
        connect(RemoteExperts(peer, decode_tokens))
        with replaced_routed_experts(remote_routed_experts(peer.layer_names)):
            super().load_model(*args, **kwargs)
        model = self.model_runner.get_model()
        _check_no_experts(me, model)
        write_record(
            run_dir(),
            ServerRecord.of(me, self.vllm_config, _bytes(model), peer.layer_names),
        )
        _await_moe_servers(me, settings.config)


def _await_moe_servers(me: Server, config: ExpertPlexConfig) -> None:
    """The warm-up that follows runs remote layers, whose deadline is far below a loading time."""
    deadline = time.monotonic() + config.startup_timeout_s
    for moe in config.parsed_layout.moe_servers:
        while read_record(run_dir(), moe) is None:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{me.name}: {moe.name} has not loaded its experts within startup_timeout_s = "
                    f"{config.startup_timeout_s:g} s"
                )
            time.sleep(0.02)


def _check_no_experts(me: Server, model: torch.nn.Module) -> None:
    held = [
        name
        for name, parameter in model.named_parameters()
        if is_expert_weight(name) and parameter.numel() > 0
    ]
    if held:
        raise RuntimeError(
            f"{me.name} holds routed-expert weights ({', '.join(held[:3])}): this model does not "
            "run its experts through vLLM's RoutedExperts layer and cannot be served by ExpertPlex"
        )


def _bytes(model: torch.nn.Module) -> int:
    # Tied weights are one tensor under two names; named_parameters yields each tensor once.
    return sum(p.numel() * p.element_size() for p in model.parameters())
