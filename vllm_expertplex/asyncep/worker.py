"""The worker of an engine: vLLM's worker with experts that are gathered layer by layer.

Owns: loading a model's experts into a shard, and measuring the engine at start-up.
Must not know: requests, how the threshold is made of what is measured, kinds of memory.
"""

import time
from typing import Any

import torch
from vllm.config import set_current_vllm_config

from vllm_expertplex.asyncep import loader  # noqa: F401  registers the load format
from vllm_expertplex.asyncep.config import AsyncEPSettings
from vllm_expertplex.asyncep.experts import split_routed_experts
from vllm_expertplex.asyncep.kv_free import one_layer
from vllm_expertplex.asyncep.memory import Memory
from vllm_expertplex.asyncep.speed import Speed
from vllm_expertplex.asyncep.weights import ExpertWeights
from vllm_expertplex.config import run_dir
from vllm_expertplex.executor.seam import replaced_routed_experts
from vllm_expertplex.layout import ExpertMap
from vllm_expertplex.serve.records import ServerRecord, write_record


class AsyncEPWorker:
    """In front of one of vLLM's workers: one engine's."""

    vllm_config: Any
    model_runner: Any
    weights: ExpertWeights

    def memories(self) -> tuple[Memory, Memory]:
        """Where layers are computed from, and where offloaded ones are."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Return once everything computed so far is done."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        settings = AsyncEPSettings.from_additional_config(self.vllm_config.additional_config)
        assert settings is not None  # the executor checked
        me, model_config = settings.server, self.vllm_config.model_config
        experts = ExpertMap.contiguous(model_config.get_num_experts(), settings.config.gpus)
        layers: list[Any] = []
        offloaded = torch.device("cpu") if settings.config.offload_layers else None
        mine = experts.local_experts(me.rank)
        with replaced_routed_experts(split_routed_experts(mine, layers, offloaded)):
            super().load_model(*args, **kwargs)  # type: ignore[misc]
        if not layers:
            raise ValueError(
                f"{model_config.model} ({model_config.architectures}) has no routed experts that "
                "vLLM runs through its RoutedExperts layer; serve it without --executor asyncep"
            )
        near, far = self.memories()
        self.weights = ExpertWeights(run_dir(), me, settings.config, layers, experts, near, far)
        self.weights.connect(layers)
        rest = sum(p.numel() * p.element_size() for p in self._other_parameters(layers))
        held = rest + self.weights.resident_bytes
        write_record(run_dir(), ServerRecord.of(me, self.vllm_config, held, self.weights.names))
        self._measure().write(run_dir(), me)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        settings = AsyncEPSettings.from_additional_config(self.vllm_config.additional_config)
        assert settings is not None  # the executor checked
        if settings.config.kv_free:
            layout = self.vllm_config.cache_config.get_resolved_kv_cache_layout()
            kv_cache_config = one_layer(kv_cache_config, layout)
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]

    def _other_parameters(self, layers: list[Any]) -> list[torch.nn.Parameter]:
        """Everything but routed experts; tied weights are one tensor under two names."""
        routed = {id(p) for layer in layers for p in layer.parameters(recurse=False)}
        model = self.model_runner.get_model()
        return [p for p in model.parameters() if id(p) not in routed]

    def _measure(self) -> Speed:
        """Time a forward pass whose experts are all there."""
        gather = self.weights.gather
        if gather is None:
            return Speed(0.0, 0.0, 0)
        tokens = self.vllm_config.scheduler_config.max_num_batched_tokens
        gather.pause(True)
        try:
            best = float("inf")
            with set_current_vllm_config(self.vllm_config):
                for _ in range(2):
                    started = time.perf_counter()
                    self.model_runner._dummy_run(tokens, is_profile=True, randomize_inputs=True)
                    self.synchronize()
                    best = min(best, time.perf_counter() - started)
            return Speed(self.weights.gather_s, best, tokens)
        finally:
            gather.pause(False)
