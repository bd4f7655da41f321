"""A running AsyncEP deployment: its engines' start, health and end.

Owns: the engines' configurations, their order of start, what is known of each.
Must not know: requests, tensors.
"""

import copy
import time
from collections.abc import Callable, Sequence

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.engine.core_client import AsyncMPClient

from vllm_expertplex.asyncep.board import Board
from vllm_expertplex.asyncep.config import AsyncEPSettings
from vllm_expertplex.asyncep.flops import Flops
from vllm_expertplex.asyncep.kv_free import blocks_needed
from vllm_expertplex.asyncep.loader import DUMMY_LOAD_FORMAT
from vllm_expertplex.asyncep.speed import Speed
from vllm_expertplex.asyncep.threshold import Threshold
from vllm_expertplex.client import kv_events
from vllm_expertplex.config import run_dir
from vllm_expertplex.layout import Server
from vllm_expertplex.planner.model_configs import from_config
from vllm_expertplex.planner.models import ModelSpec
from vllm_expertplex.serve import forkserver
from vllm_expertplex.serve.cleanup import kill_all
from vllm_expertplex.serve.engines import DeploymentError, handshake, routed_experts, start_engines
from vllm_expertplex.serve.options import DUMMY
from vllm_expertplex.serve.placement import Place, visible_gpus, write_places
from vllm_expertplex.serve.records import ServerRecord

logger = init_logger(__name__)


class AsyncEPDeployment:
    """Starts N engines. `engines[i]` is the engine-core client of `servers[i]`."""

    def __init__(self, vllm_config: VllmConfig, settings: AsyncEPSettings) -> None:
        self.config = settings.config
        self.servers = self.config.servers
        self.run_dir = run_dir()
        self.engines: list[AsyncMPClient] = []
        self.records: dict[str, ServerRecord] = {}
        self.lost: set[str] = set()
        _check_experts(vllm_config, self.config.gpus)
        if not current_platform.is_cpu():
            gpus = visible_gpus(current_platform.device_count())
            write_places(self.run_dir, place(self.servers, gpus))
            if len(gpus) == 1 and self.config.gpus > 1:
                _share(vllm_config, self.config.gpus)
        self.model = _model_of(vllm_config)
        self.flops = Flops(self.model)
        self.threshold = Threshold(0.0, 0.0, self.config.gamma)  # until engines have measured
        self.configs = [self._config_of(vllm_config, server) for server in self.servers]
        self.boards = [Board(self.run_dir, server, create=True) for server in self.servers]
        self._stopping = False

    def _config_of(self, base: VllmConfig, server: Server) -> VllmConfig:
        config = copy.deepcopy(base)
        config.instance_id = f"{base.instance_id}-{server.name}"
        mine = AsyncEPSettings(self.config, server.rank)
        config.additional_config = {**base.additional_config, **mine.to_additional_config()}
        asynchronous = bool(config.scheduler_config.async_scheduling)
        scheduler_cls = "AsyncBatchScheduler" if asynchronous else "BatchScheduler"
        config.scheduler_config.scheduler_cls = f"vllm_expertplex.asyncep.scheduler.{scheduler_cls}"
        # Steps of thousands of tokens gain nothing from graphs, and layers wait for events that no
        # graph knows.
        config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
        if self.config.offload_layers and config.load_config.load_format == DUMMY:
            config.load_config.load_format = DUMMY_LOAD_FORMAT
        if self.config.kv_free:
            scheduler, cache = config.scheduler_config, config.cache_config
            cache.num_gpu_blocks_override = blocks_needed(
                scheduler.max_num_batched_tokens,
                scheduler.max_num_seqs,
                cache.block_size,
                self._steps_at_once(config),
            )
        if config.cache_config.enable_prefix_caching:
            config.kv_events_config = kv_events.publishing(self.run_dir, server)
        return config

    def start(self, make_engine: Callable[[VllmConfig, int], AsyncMPClient]) -> None:
        """Start all engines at once. Raises DeploymentError naming the engine and its reason."""
        begin = time.monotonic()
        logger.info("AsyncEP: starting %d engines", len(self.servers))
        forkserver.use_for_engines()
        try:
            self.engines = start_engines(
                self.run_dir,
                self.servers,
                self.configs,
                make_engine,
                timeout_s=self.config.startup_timeout_s,
            )
            self.records = handshake(self.run_dir, self.servers)
            speeds = [Speed.read(self.run_dir, server) for server in self.servers]
        except BaseException:  # Ctrl-C too
            self.shutdown()
            raise
        layers, gamma = self.model.moe_layers, self.config.gamma
        self.threshold = Threshold.of(speeds, self.flops, layers, gamma)
        logger.info("AsyncEP: ready in %.1f s", time.monotonic() - begin)
        self._report_threshold()
        self._report_small_kv()

    def _report_threshold(self) -> None:
        threshold = self.threshold
        if not threshold.flops:
            return
        needed = self.flops.tokens_for(threshold.flops)
        step = self.configs[0].scheduler_config.max_num_batched_tokens
        logger.info(
            "AsyncEP: a layer is gathered in %.2f ms; engines reach %.3g TFLOP/s; batches of %.0f "
            "tokens (fewer where they are long) hide the gather",
            threshold.gather_s * 1e3,
            threshold.flops_per_s / 1e12,
            needed,
        )
        if needed > step:
            logger.warning(
                "AsyncEP: %.0f tokens hide the gather of a layer, but a step takes at most "
                "--max-num-batched-tokens %d: raise it, or use fewer engines",
                needed,
                step,
            )

    @staticmethod
    def _steps_at_once(config: VllmConfig) -> int:
        """With async scheduling vLLM plans a step while another runs; both hold KV blocks."""
        return 2 if config.scheduler_config.async_scheduling else 1

    def _report_small_kv(self) -> None:
        config = self.configs[0]
        step, steps = config.scheduler_config.max_num_batched_tokens, self._steps_at_once(config)
        held = (config.cache_config.num_gpu_blocks or 0) * self.block_size
        if held < steps * step:
            logger.warning(
                "AsyncEP: the KV cache holds %d tokens, fewer than the %d steps of %d that are "
                "planned at once: some steps will be small, and gather all experts all the same. "
                "Give it more memory, or lower --max-num-batched-tokens",
                held,
                steps,
                step,
            )

    @property
    def step_tokens(self) -> int:
        """The most tokens that an engine computes at once."""
        return int(self.configs[0].scheduler_config.max_num_batched_tokens)

    @property
    def block_size(self) -> int:
        """Tokens of a KV cache block, as engines use it."""
        return self.configs[0].cache_config.block_size

    @property
    def reuses_prefixes(self) -> bool:
        """Whether engines keep the KV of prompts they have computed."""
        return bool(self.configs[0].cache_config.enable_prefix_caching)

    def kill(self, server: Server) -> None:
        """End an engine that does not react any more."""
        kill_all([self.records[server.name].pid])

    def shutdown(self) -> None:
        if self._stopping:
            return
        self._stopping = True
        for engine in self.engines:
            engine.shutdown(timeout=0)


def _model_of(vllm_config: VllmConfig) -> ModelSpec:
    """The text model. Its weights' format may stand in the outer config of a multimodal one."""
    model = vllm_config.model_config
    weights = model.model_arch_config.quantization_config
    text = {**model.hf_text_config.to_dict(), "quantization_config": weights}
    return from_config(text, model.model)


def _check_experts(vllm_config: VllmConfig, gpus: int) -> None:
    """Say before anything starts that a model cannot be split."""
    experts = routed_experts(vllm_config, "asyncep")
    if gpus > experts:
        raise DeploymentError(
            f"{experts} experts cannot be split over --asyncep-gpus {gpus}; use between 1 and "
            f"{experts}"
        )


def place(servers: Sequence[Server], gpus: Sequence[str]) -> dict[str, Place]:
    """Server name -> a GPU of its own, or the only one there is. Raises DeploymentError where
    there are several, but too few.
    """
    if len(gpus) == 1:
        return {server.name: Place(gpus[0], len(servers)) for server in servers}
    if len(gpus) < len(servers):
        raise DeploymentError(
            f"--asyncep-gpus {len(servers)} needs as many GPUs, {len(gpus)} are visible; use fewer "
            "engines, with offload_layers in --asyncep-config if they are too small"
        )
    return {server.name: Place(gpu) for server, gpu in zip(servers, gpus, strict=False)}


def _share(config: VllmConfig, engines: int) -> None:
    """Several engines on the only GPU, to develop and test. Raises DeploymentError unless the KV
    cache has a size: an engine that measured free memory would count what others take meanwhile.
    """
    if not config.cache_config.kv_cache_memory_bytes:
        raise DeploymentError(
            f"{engines} engines would share the one GPU that is visible: say how large each one's "
            "KV cache is with --kv-cache-memory-bytes, or use --asyncep-gpus 1"
        )
    config.cache_config.gpu_memory_utilization /= engines
    logger.warning(
        "AsyncEP: %d engines take turns on one GPU: good for development, slower than one", engines
    )
