"""A running deployment: MoE server processes, engine clients, their start, health and end.

Owns: start-up order and progress, the handshake, noticing a dead MoE server, stopping.
Must not know: requests, tensors.
"""

import copy
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import wait as wait_for_sentinels
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.engine.core_client import AsyncMPClient

from vllm_expertplex._scheduler import MAX_SOURCES
from vllm_expertplex.client import kv_events
from vllm_expertplex.comm.shm import Board, Slot, board_path, slot_path
from vllm_expertplex.config import ExpertPlexConfig, ServerSettings, run_dir
from vllm_expertplex.layout import DECODE, PREFILL, Server
from vllm_expertplex.moe_server import server as moe_server
from vllm_expertplex.moe_server.apk.structs import MAX_SLOTS
from vllm_expertplex.quantization import QuantScheme, quant_scheme
from vllm_expertplex.serve import forkserver, gpu, placement
from vllm_expertplex.serve.cleanup import kill_all
from vllm_expertplex.serve.engines import (
    DeploymentError,
    handshake,
    kill_servers,
    routed_experts,
    start_engines,
)
from vllm_expertplex.serve.records import ServerRecord, read_error, read_record, write_ports
from vllm_expertplex.shapes import expert_map, slot_configs, slot_owners, slot_shape, sources

logger = init_logger(__name__)

_STOP_TIMEOUT_S = 5.0
_TRACE_TIMEOUT_S = 60.0  # more, where MoE servers write what all their workers did


class Deployment:
    """Starts every server of a layout and watches the MoE servers.

    `engines[i]` is the engine-core client of attention server i of the layout. Use `start` once,
    then `failure` (None, or what is wrong) and `shutdown`.
    """

    def __init__(self, vllm_config: VllmConfig, settings: ServerSettings) -> None:
        self.config = settings.config
        self.layout = self.config.parsed_layout
        self.run_dir = run_dir()
        self.engines: list[AsyncMPClient] = []
        self.records: dict[str, ServerRecord] = {}
        self.lost: set[str] = set()
        _check_model(vllm_config, self.config)
        self.configs = [_role_config(vllm_config, settings, s) for s in self._attention]
        for server, config in zip(self._attention, self.configs, strict=True):
            if self.says_what_it_caches(server):
                config.kv_events_config = kv_events.publishing(self.run_dir, server)
        if not current_platform.is_cpu():
            gpu.prepare(self.run_dir, self.config, self._attention, self.configs)
        self._failure: str | None = None
        self._stopping = False
        self._on_failure: Callable[[], None] | None = None
        self._processes: list[Any] = []
        self.boards = [
            Board(board_path(self.run_dir, moe), create=True) for moe in self.layout.moe_servers
        ]
        # On GPUs the servers themselves allocate the slots, in the MoE servers' memory.
        self.slots = {
            (owner, moe): Slot(
                slot_path(self.run_dir, owner, moe),
                slot_shape(vllm_config, owner.microbatch),
                create=True,
            )
            for owner, vllm_config in slot_configs(self.config, self.configs)
            for moe in self.layout.moe_servers
            if current_platform.is_cpu()
        }
        # Held until everybody has started: an engine may take minutes until it uses its own.
        self._ports = {server.name: _reserve_port() for server in self._attention}
        write_ports(self.run_dir, {name: s.getsockname()[1] for name, s in self._ports.items()})

    @property
    def _attention(self) -> list[Server]:
        return self.layout.attention_servers

    def start(self, make_engine: Callable[[VllmConfig, bool], AsyncMPClient]) -> None:
        """Start all servers at once and wait until each has loaded.

        `make_engine(config, is_first_decode)` starts one engine and returns when it is ready.
        Raises DeploymentError naming the server and its reason.
        """
        begin = time.monotonic()
        logger.info("ExpertPlex %s: starting %d servers", self.layout, len(list(self.layout)))
        forkserver.use_for_engines()
        try:
            self._start_moe_servers()
            self.engines = start_engines(
                self.run_dir,
                self._attention,
                self.configs,
                lambda config, index: make_engine(config, index == self.layout.prefill),
                timeout_s=self.config.startup_timeout_s,
                failure=lambda: self._failure,
                give_up=self._give_up,
            )
            self._await_moe_servers(begin)
            self.records = handshake(self.run_dir, list(self.layout))
            for port in self._ports.values():
                port.close()
        except BaseException:  # Ctrl-C too
            self.shutdown()
            raise
        logger.info("ExpertPlex %s: ready in %.1f s", self.layout, time.monotonic() - begin)

    def _give_up(self) -> None:
        self._stopping = True

    def _start_moe_servers(self) -> None:
        for moe in self.layout.moe_servers:
            process = forkserver.context().Process(  # type: ignore[attr-defined]
                target=placement.run,
                name=f"expertplex-{moe.name}",
                args=(
                    *(self.run_dir, moe, moe_server.main),
                    *(self.run_dir, moe.rank, self.config, self.configs),
                ),
            )
            process.start()
            self._processes.append(process)
        threading.Thread(target=self._watch, name="expertplex-watch", daemon=True).start()

    def _watch(self) -> None:
        """Wait for a MoE server to end, or to stop making progress: failures unless we stop it."""
        sentinels = {process.sentinel: index for index, process in enumerate(self._processes)}
        interval = min(1.0, self.config.heartbeat_timeout_s / 4)
        while not (ended := wait_for_sentinels(list(sentinels), timeout=interval)):
            self._check_heartbeats()
        if self._stopping:
            return
        rank = sentinels[ended[0]]  # type: ignore[index]
        moe, process = self.layout.moe_servers[rank], self._processes[rank]
        process.join()
        reason = read_error(self.run_dir, moe) or _exit_reason(process.exitcode)
        self._fail(moe, f"{moe.name} (pid {process.pid}) is gone: {reason}")

    def _fail(self, moe: Server, reason: str) -> None:
        if self._failure is not None or self._stopping:
            return
        logger.error("%s; every request needs it, so the deployment ends", reason)
        self._failure = reason
        self.mark_lost(moe.name)
        if not self.records:
            # Still starting: do not wait for engines that nobody will use.
            kill_servers(self.run_dir)
        if self._on_failure is not None:
            self._on_failure()
        # Only its own: whoever waits for another one names the one it waits for.
        for (_, where), slot in self.slots.items():
            if where == moe:
                slot.fail()

    def layer_counters(self, server: Server) -> Counter[str]:
        """Remote layers of an attention server so far, and their times; empty on GPUs."""
        first = self.layout.moe_servers[0]  # where an attention server keeps them
        counters: Counter[str] = Counter()
        for (owner, moe), slot in self.slots.items():
            if (owner.server, moe) == (server, first):
                counters.update(slot.counters())
        return counters

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Call `callback` from another thread when a MoE server is lost; at once if it was."""
        self._on_failure = callback
        if self._failure is not None:
            callback()

    def _check_heartbeats(self) -> None:
        """Notice a MoE server that lives but makes no progress."""
        if not self.records:
            return  # not loaded yet
        for moe, board in zip(self.layout.moe_servers, self.boards, strict=True):
            age = board.heartbeat_age_s()
            if age > self.config.heartbeat_timeout_s:
                self._fail(
                    moe,
                    f"{moe.name} has shown no progress for {age:.1f} s "
                    f"(heartbeat_timeout_s = {self.config.heartbeat_timeout_s:g})",
                )

    def says_what_it_caches(self, server: Server) -> bool:
        """Whether it matters which prefill server a prompt goes to."""
        cache = self.configs[0].cache_config
        several = server.role == PREFILL and self.layout.prefill > 1
        return several and bool(cache.enable_prefix_caching)

    @property
    def block_size(self) -> int:
        """Tokens of a KV cache block."""
        return self.configs[0].cache_config.block_size

    @property
    def failure(self) -> str | None:
        """Which MoE server is lost, and why; or None."""
        return self._failure

    def kill(self, name: str) -> None:
        """End a server that does not react any more."""
        kill_all([self.records[name].pid])

    def mark_lost(self, name: str) -> None:
        """Remember that a server is gone."""
        self.lost.add(name)

    def _await_moe_servers(self, begin: float) -> None:
        deadline = begin + self.config.startup_timeout_s
        for moe in self.layout.moe_servers:
            while read_record(self.run_dir, moe) is None:
                if self._failure or time.monotonic() > deadline:
                    reason = self._failure or (
                        f"{moe.name} has not loaded its experts within startup_timeout_s = "
                        f"{self.config.startup_timeout_s:g} s"
                    )
                    raise DeploymentError(reason)
                time.sleep(0.02)
            logger.info("%s is ready after %.1f s", moe.name, time.monotonic() - begin)

    def shutdown(self) -> None:
        """Stop engines, then MoE servers; kill what does not stop in time."""
        if self._stopping:
            return
        self._stopping = True
        for engine in self.engines:
            engine.shutdown(timeout=0)
        for board in self.boards:
            board.stop()
        patience_s = _TRACE_TIMEOUT_S if self.config.trace else _STOP_TIMEOUT_S
        deadline = time.monotonic() + patience_s
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                logger.warning("%s did not stop in time; killing it", process.name)
                process.kill()
                process.join(_STOP_TIMEOUT_S)  # one in a driver's hands may not even die


def _reserve_port() -> socket.socket:
    """A loopback port that nobody else is given; whoever sets SO_REUSEADDR, as ZeroMQ does, can
    listen on it all the same.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder


def _check_model(vllm_config: VllmConfig, config: ExpertPlexConfig) -> None:
    """Say before anything starts that this layout cannot serve this model."""
    routed_experts(vllm_config, "expertplex")
    model = vllm_config.model_config
    if model.runner_type != "generate":
        raise DeploymentError(
            f"{model.model} ({', '.join(model.architectures)}) is run as a {model.runner_type} "
            "model; only generation is served, use --executor asyncep"
        )
    if (senders := len(sources(config))) > MAX_SOURCES:
        ranks = config.tensor_parallel_size
        raise DeploymentError(
            f"layout {config.layout} has {senders // ranks} attention servers of {ranks} ranks; a "
            f"MoE server takes operations of at most {MAX_SOURCES} ranks"
        )
    if not current_platform.is_cpu() and (slots := len(slot_owners(config))) > MAX_SLOTS:
        raise DeploymentError(
            f"layout {config.layout} with tensor_parallel_size {config.tensor_parallel_size} and "
            f"tbo_tokens {config.tbo_tokens} needs {slots} slots at every MoE server: one per rank "
            "of an attention server, and a second one of prefill's for two-batch overlap. On a GPU "
            f"it serves at most {MAX_SLOTS}; set tbo_tokens = 0, or use fewer prefill servers"
        )
    try:
        expert_map(vllm_config, config.parsed_layout)
    except ValueError as error:
        raise DeploymentError(str(error)) from None


def _exit_reason(code: int | None) -> str:
    return f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"


def _role_config(base: VllmConfig, settings: ServerSettings, server: Server) -> VllmConfig:
    """The configuration of one attention server's engine."""
    config = copy.deepcopy(base)
    config.instance_id = f"{base.instance_id}-{server.name}"
    config.kv_transfer_config = kv_transfer_config(settings, server.role)
    if server.role == DECODE:
        asynchronous = bool(config.scheduler_config.async_scheduling)
        name = "AsyncDecodeScheduler" if asynchronous else "DecodeScheduler"
        config.scheduler_config.scheduler_cls = f"vllm_expertplex.executor.scheduler.{name}"
    if current_platform.is_cpu() and quant_scheme(base) is not QuantScheme.NONE:
        # vLLM's CPU layers take FP8 on few CPUs; attention servers dequantise as they load, and
        # MoE servers compute from the checkpoint's own FP8.
        config.quant_config = None
        config.model_config.quantization = None
    mine = ServerSettings(settings.config, server.role, server.rank)
    shared: Any = base.additional_config
    config.additional_config = {**shared, **mine.to_additional_config()}
    return config


def kv_transfer_config(settings: ServerSettings, role: str) -> KVTransferConfig:
    """How prefill servers hand KV to decode servers: NIXL, pulled by decode, from the memory of
    the device they compute on.
    """
    return KVTransferConfig(
        kv_connector="NixlConnector",
        kv_connector_module_path="vllm_expertplex.executor.kv_rows",
        kv_role="kv_producer" if role == PREFILL else "kv_consumer",
        kv_buffer_device=current_platform.device_type,
        engine_id=str(uuid.uuid4()),
        kv_connector_extra_config={
            "num_threads": 0,
            "kv_lease_duration": int(settings.config.kv_lease_s),
        },
    )
