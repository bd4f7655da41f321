"""The worker of an attention server: vLLM's worker with experts elsewhere.

Owns: loading a model without routed experts, and meeting the MoE servers before it first runs.
Must not know: how MoE servers compute, how bytes travel.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch

from vllm_expertplex.comm.transport import Transport
from vllm_expertplex.config import ExpertPlexConfig, ServerSettings, run_dir
from vllm_expertplex.executor import microbatches
from vllm_expertplex.executor.loader import is_expert_weight
from vllm_expertplex.executor.patches import apply_attention_patches
from vllm_expertplex.executor.remote_experts import RemoteExperts, connect, remote_routed_experts
from vllm_expertplex.executor.seam import replaced_routed_experts
from vllm_expertplex.layout import DECODE, PREFILL, Server, SlotOwner
from vllm_expertplex.serve.records import ServerRecord, errors_written, read_record, write_record
from vllm_expertplex.shapes import decode_step_tokens, slot_owners


class AttentionWorker:
    """In front of one of vLLM's workers: a prefill or decode server's."""

    vllm_config: Any
    parallel_config: Any
    model_runner: Any
    rank: int  # tensor parallel
    _transports: Sequence[Any]  # one per microbatch of a step; from when the model is loaded

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        apply_attention_patches()
        super().__init__(*args, **kwargs)

    def make_transport(self, owner: SlotOwner, config: ExpertPlexConfig) -> Transport:
        """This server's end of the data path for one of its slots; MoE servers may still be
        loading.
        """
        raise NotImplementedError

    def connect_transports(self, config: ExpertPlexConfig) -> None:
        """Open what MoE servers publish once they have loaded, where there is such a thing."""

    @property
    def _settings(self) -> ServerSettings:
        settings = ServerSettings.from_additional_config(self.vllm_config.additional_config)
        assert settings is not None  # the executor checked
        return settings

    @property
    def _me(self) -> Server:
        return Server(self._settings.role, self._settings.rank)

    @property
    def _tbo_tokens(self) -> int:
        """Steps of so many tokens run as two microbatches; 0: none does."""
        return self._settings.config.tbo_tokens if self._settings.role == PREFILL else 0

    def init_device(self) -> None:
        if self._tbo_tokens:
            self.vllm_config = microbatches.prepared(self.vllm_config)
            self.parallel_config = self.vllm_config.parallel_config
        super().init_device()  # type: ignore[misc]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with errors_written(run_dir(), self._me):
            self._load_model(*args, **kwargs)

    def _load_model(self, *args: Any, **kwargs: Any) -> None:
        settings, me = self._settings, self._me
        rank, ranks = self.rank, settings.config.tensor_parallel_size
        owners = [
            owner
            for owner in slot_owners(settings.config)
            if owner.server == me and owner.tp_rank == rank
        ]
        peers = [self.make_transport(owner, settings.config) for owner in owners]
        self._transports = peers
        layer_names: list[str] = []
        decode_tokens = decode_step_tokens(self.vllm_config) if me.role == DECODE else 0
        connect(RemoteExperts(peers, decode_tokens, rank, ranks))
        with replaced_routed_experts(remote_routed_experts(layer_names)):
            super().load_model(*args, **kwargs)  # type: ignore[misc]
        for peer in peers:
            peer.layer_names = layer_names
        if self._tbo_tokens:
            deadline_s = settings.config.moe_timeout_s
            microbatches.install(self.model_runner, self.vllm_config, self._tbo_tokens, deadline_s)
        model = self.model_runner.get_model()
        _check_no_experts(me, model)
        if rank == 0:
            held = _bytes(model) * ranks  # which all hold as much
            write_record(run_dir(), ServerRecord.of(me, self.vllm_config, held, layer_names))
        self.connect_transports(settings.config)
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
            f"{me.name} holds routed-expert weights ({', '.join(held[:3])}): "
            f"{type(model).__name__} does not run its experts through vLLM's RoutedExperts layer, "
            "so it is not supported; serve it without --executor expertplex"
        )


def _bytes(model: torch.nn.Module) -> int:
    # Tied weights are one tensor under two names; named_parameters yields each tensor once.
    return sum(p.numel() * p.element_size() for p in model.parameters())
