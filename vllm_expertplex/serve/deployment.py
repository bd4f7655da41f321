"""A running deployment: MoE server processes, engine clients, their start, health and end.

Owns: start-up order and progress, the handshake, noticing a dead MoE server, stopping.
Must not know: requests, tensors.
"""

import copy
import multiprocessing
import os
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait as wait_for_sentinels
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.logger import init_logger
from vllm.utils.network_utils import get_open_port
from vllm.v1.engine.core_client import AsyncMPClient

from vllm_expertplex.comm.shm import Board, Slot, board_path, slot_path
from vllm_expertplex.config import ENV_RUN_DIR, ServerSettings, run_dir
from vllm_expertplex.layout import DECODE, PREFILL, Server
from vllm_expertplex.moe_server import server as moe_server
from vllm_expertplex.serve.cleanup import kill_all, processes_of
from vllm_expertplex.serve.records import (
    ServerRecord,
    check_agreement,
    read_error,
    read_record,
    write_ports,
)
from vllm_expertplex.shapes import expert_map, slot_shape

logger = init_logger(__name__)

_STOP_TIMEOUT_S = 5.0


class DeploymentError(RuntimeError):
    """The deployment could not start, or lost a server that everything needs."""


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
        self.configs = [_role_config(vllm_config, settings, s) for s in self._attention]
        expert_map(vllm_config, self.layout)  # too many MoE servers: say so before starting any
        self._failure: str | None = None
        self._stopping = False
        self._on_failure: Callable[[], None] | None = None
        self._processes: list[Any] = []
        self.boards = [
            Board(board_path(self.run_dir, moe), create=True) for moe in self.layout.moe_servers
        ]
        self.slots = {
            (source.name, moe.name): Slot(
                slot_path(self.run_dir, source, moe), slot_shape(config), create=True
            )
            for source, config in zip(self._attention, self.configs, strict=True)
            for moe in self.layout.moe_servers
        }
        write_ports(self.run_dir, {server.name: get_open_port() for server in self._attention})

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
        self._start_moe_servers()
        front = self.layout.prefill  # index of the first decode server
        with ThreadPoolExecutor(len(self.configs), "expertplex-start") as pool:
            futures = [
                pool.submit(make_engine, config, index == front)
                for index, config in enumerate(self.configs)
            ]
            errors = []
            for server, future in zip(self._attention, futures, strict=True):
                try:
                    self.engines.append(future.result())
                    logger.info("%s is ready after %.1f s", server.name, time.monotonic() - begin)
                except Exception as error:
                    errors.append(f"{server.name}: {error}")
        if self._failure or errors:
            self.shutdown()
            raise DeploymentError(self._failure or "; ".join(errors))
        self._await_moe_servers(begin)
        self._handshake()
        logger.info("ExpertPlex %s: ready in %.1f s", self.layout, time.monotonic() - begin)

    def _start_moe_servers(self) -> None:
        context = multiprocessing.get_context("spawn")
        for moe in self.layout.moe_servers:
            process = context.Process(
                target=moe_server.main,
                name=f"expertplex-{moe.name}",
                args=(self.run_dir, moe.rank, self.config, self.configs),
            )
            process.start()
            self._processes.append(process)
        threading.Thread(target=self._watch, name="expertplex-watch", daemon=True).start()

    def _watch(self) -> None:
        """Wait for a MoE server to end; unless we are stopping, that is a failure."""
        sentinels = {process.sentinel: index for index, process in enumerate(self._processes)}
        (ended, *_) = wait_for_sentinels(list(sentinels))
        if self._stopping:
            return
        rank = sentinels[ended]  # type: ignore[index]
        moe, process = self.layout.moe_servers[rank], self._processes[rank]
        process.join()
        reason = read_error(self.run_dir, moe) or _exit_reason(process.exitcode)
        self._fail(f"{moe.name} (pid {process.pid}) is gone: {reason}")

    def _fail(self, reason: str) -> None:
        if self._failure is not None or self._stopping:
            return
        logger.error("%s; every request needs it, so the deployment ends", reason)
        self._failure = reason
        if not self.records:
            # Still starting: do not wait for engines that nobody will use.
            kill_all(processes_of(self.run_dir, ENV_RUN_DIR, exclude={os.getpid()}, trackers=False))
        for slot in self.slots.values():
            slot.fail()
        if self._on_failure is not None:
            self._on_failure()

    def on_failure(self, callback: Callable[[], None]) -> None:
        """Call `callback` from another thread when a MoE server is lost; at once if it was."""
        self._on_failure = callback
        if self._failure is not None:
            callback()

    @property
    def failure(self) -> str | None:
        """What is wrong, or None. Notices a MoE server that lives but makes no progress."""
        if self._failure is None and not self._stopping and self.records:
            for moe, board in zip(self.layout.moe_servers, self.boards, strict=True):
                age = board.heartbeat_age_s()
                if age > self.config.heartbeat_timeout_s:
                    self._fail(
                        f"{moe.name} has shown no progress for {age:.0f} s "
                        f"(heartbeat_timeout_s = {self.config.heartbeat_timeout_s:g})"
                    )
        return self._failure

    def mark_lost(self, name: str) -> None:
        """Remember that an attention server is gone."""
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
                    self.shutdown()
                    raise DeploymentError(reason)
                time.sleep(0.02)
            logger.info("%s is ready after %.1f s", moe.name, time.monotonic() - begin)

    def _handshake(self) -> None:
        for server in self.layout:
            record = read_record(self.run_dir, server)
            if record is None:
                raise DeploymentError(f"{server.name} left no record of what it loaded")
            self.records[server.name] = record
        try:
            check_agreement(list(self.records.values()))
        except Exception:
            self.shutdown()
            raise

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop engines, then MoE servers; kill what does not stop in time."""
        if self._stopping:
            return
        self._stopping = True
        for engine in self.engines:
            engine.shutdown(timeout=timeout)
        for board in self.boards:
            board.stop()
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                logger.warning("%s did not stop in time; killing it", process.name)
                process.kill()
                process.join()


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
    mine = ServerSettings(settings.config, server.role, server.rank)
    shared: Any = base.additional_config
    config.additional_config = {**shared, **mine.to_additional_config()}
    return config


def kv_transfer_config(settings: ServerSettings, role: str) -> KVTransferConfig:
    """How prefill servers hand KV to decode servers: NIXL, pulled by decode."""
    return KVTransferConfig(
        kv_connector="NixlConnector",
        kv_role="kv_producer" if role == PREFILL else "kv_consumer",
        kv_buffer_device="cpu",
        engine_id=str(uuid.uuid4()),
        kv_connector_extra_config={
            "num_threads": 0,
            "kv_lease_duration": int(settings.config.kv_lease_s),
        },
    )
