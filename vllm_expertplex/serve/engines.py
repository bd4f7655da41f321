"""Starting the engines of a deployment side by side, and comparing what they say they loaded.

Owns: their start with progress and errors by name, ending those half started, the handshake, and
what a deployment of any kind asks before and takes over after it.
Must not know: roles, what an executor adds around its engines.
"""

import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from pathlib import Path

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.engine.core_client import AsyncMPClient

from vllm_expertplex.config import ENV_RUN_DIR
from vllm_expertplex.layout import Server
from vllm_expertplex.serve.cleanup import kill_all, processes_of
from vllm_expertplex.serve.records import (
    MismatchError,
    ServerRecord,
    check_agreement,
    read_error,
    read_record,
)

logger = init_logger(__name__)


class DeploymentError(RuntimeError):
    """A deployment could not start, or lost a server that everything needs."""


def start_engines(
    run_dir: Path,
    servers: Sequence[Server],
    configs: Sequence[VllmConfig],
    make_engine: Callable[[VllmConfig, int], AsyncMPClient],
    *,
    timeout_s: float | None = None,
    failure: Callable[[], str | None] = lambda: None,
    give_up: Callable[[], None] = lambda: None,
) -> list[AsyncMPClient]:
    """Start all engines at once; `make_engine(config, index)` returns when one is ready.

    When one fails, or is not ready within `timeout_s`, `give_up` is called, every process of the
    run is killed, and DeploymentError names the engine and its reason, or `failure()` if there is
    one.
    """
    with ThreadPoolExecutor(len(configs), "expertplex-start") as pool:
        starting = {
            pool.submit(make_engine, config, index): server
            for index, (server, config) in enumerate(zip(servers, configs, strict=True))
        }
        try:
            _await(run_dir, starting, timeout_s, failure)
        except BaseException:
            # Leaving the pool waits for its threads: do not let them load what nobody will
            # use. A thread may be about to start its process, hence again and again.
            give_up()
            while wait(starting, timeout=0.2).not_done:
                kill_servers(run_dir)
            raise
    gc.enable()  # off since the serve command began
    return [future.result() for future in starting]


def _await(
    run_dir: Path,
    starting: Mapping[Future[AsyncMPClient], Server],
    timeout_s: float | None,
    failure: Callable[[], str | None],
) -> None:
    """Return once all engines are ready."""
    begin = time.monotonic()
    try:
        for future in as_completed(starting, timeout_s):
            server = starting[future]
            if error := future.exception():
                reason = read_error(run_dir, server) or error
                raise DeploymentError(failure() or f"{server.name}: {reason}")
            logger.info("%s is ready after %.1f s", server.name, time.monotonic() - begin)
    except TimeoutError:
        late = ", ".join(server.name for future, server in starting.items() if not future.done())
        raise DeploymentError(
            f"{late} not ready within startup_timeout_s = {timeout_s:g} s"
        ) from None


def adopt(vllm_config: VllmConfig, configs: Sequence[VllmConfig], shown: int) -> int:
    """Give the API server's configuration what started engines settled on; `shown` is the engine
    whose KV cache it shows. Returns the longest request that fits every engine.
    """
    # Engines may have lowered it to what fits their KV cache.
    fits = min(config.model_config.max_model_len for config in configs)
    vllm_config.model_config.max_model_len = fits
    cache = configs[shown].cache_config
    vllm_config.cache_config.num_gpu_blocks = cache.num_gpu_blocks
    vllm_config.cache_config.block_size = cache.block_size
    return fits


def routed_experts(vllm_config: VllmConfig, executor: str) -> int:
    """How many routed experts the model has. Raises DeploymentError where it has none."""
    model = vllm_config.model_config
    experts = model.get_num_experts()
    if not experts:
        raise DeploymentError(
            f"{model.model} ({', '.join(model.architectures)}) has no routed experts; serve it "
            f"without --executor {executor}"
        )
    return int(experts)


def kill_servers(run_dir: Path) -> None:
    """End every process of the run but this one."""
    kill_all(processes_of(run_dir, ENV_RUN_DIR, exclude={os.getpid()}, trackers=False))


def handshake(run_dir: Path, servers: Sequence[Server]) -> dict[str, ServerRecord]:
    """The records of loaded servers, by name. Raises DeploymentError when they do not agree."""
    records = {}
    for server in servers:
        record = read_record(run_dir, server)
        if record is None:
            raise DeploymentError(f"{server.name} left no record of what it loaded")
        records[server.name] = record
    try:
        check_agreement(list(records.values()))
    except MismatchError as error:
        raise DeploymentError(str(error)) from None
    return records
