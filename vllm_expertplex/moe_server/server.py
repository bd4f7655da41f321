"""The process of a MoE server: load experts, then serve operations until told to stop.

Owns: the process's life and the loop between the transport and the backend.
Must not know: requests, HTTP, other MoE servers.
"""

import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger

from vllm_expertplex._comm import MoeEndpoint
from vllm_expertplex._comm import Operation as ReadyOperation
from vllm_expertplex.comm.shm import SlotTensors, board_path, slot_path
from vllm_expertplex.config import ExpertPlexConfig
from vllm_expertplex.layout import MOE, Server, senders
from vllm_expertplex.moe_server.backend import Backend, ExpertWeights, Operation
from vllm_expertplex.serve.records import ServerRecord, write_error, write_record
from vllm_expertplex.shapes import (
    expert_map,
    fair_share,
    slot_configs,
    slot_owners,
    slot_shape,
    spin_us,
)

logger = init_logger(__name__)

# The loop wakes this often to show that it is alive, also when nobody asks for anything.
_IDLE_BEAT_S = 1.0


def main(
    run_dir: Path, rank: int, config: ExpertPlexConfig, vllm_configs: Sequence[VllmConfig]
) -> None:
    """Entry point of the process. `vllm_configs` are the attention servers', in layout order."""
    from vllm.utils.system_utils import decorate_logs, set_process_title

    me = Server(MOE, rank)
    # A Ctrl-C in the terminal reaches every process; the serve command ends us in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    set_process_title(f"expertplex-{me.name}")
    decorate_logs(me.name)
    try:
        server_class(config)(run_dir, me, config, vllm_configs).run()
    except Exception as error:
        logger.exception("%s failed", me.name)
        write_error(run_dir, me, f"{type(error).__name__}: {error}")
        sys.exit(1)


class ServerLike(Protocol):
    """A loaded MoE server."""

    def run(self) -> None:
        """Serve until the board's stop word is set."""


def server_class(config: ExpertPlexConfig) -> Callable[..., ServerLike]:
    """What serves here. Raises ValueError for a backend that this platform does not have."""
    from vllm.platforms import current_platform

    chosen, cuda = config.moe_backend, current_platform.is_cuda()
    if chosen != "auto" and (chosen == "cuda") != cuda:
        there = "cuda" if cuda else "tiles or torch"
        raise ValueError(
            f"moe_backend {chosen} does not run on {current_platform.device_type}; use auto or "
            f"{there}"
        )
    if not cuda:
        return MoeServer
    from vllm_expertplex.moe_server.cuda_server import CudaMoeServer

    return CudaMoeServer


class MoeServer:
    """The experts of one server on CPU, and the slots of all attention servers."""

    def __init__(
        self,
        run_dir: Path,
        me: Server,
        config: ExpertPlexConfig,
        vllm_configs: Sequence[VllmConfig],
    ) -> None:
        from vllm.plugins import load_general_plugins

        from vllm_expertplex.moe_server.load import load_layers

        load_general_plugins()
        torch.set_num_threads(threads(config))  # for loading
        layout = config.parsed_layout
        vllm_config = vllm_configs[0]
        start = time.monotonic()
        layers = load_layers(vllm_config, expert_map(vllm_config, layout).local_experts(me.rank))
        weights = list(layers.values())
        dtype: Any = vllm_config.model_config.dtype
        self._backend = make_backend(me, config, weights, dtype)
        owners = slot_owners(config)
        order = senders(owners)
        self._sources = [order.index(owner.source) for owner in owners]
        shapes = [slot_shape(c, o.microbatch) for o, c in slot_configs(config, vllm_configs)]
        self._endpoint = MoeEndpoint(
            [slot_path(run_dir, owner, me) for owner in owners],
            shapes,
            board_path(run_dir, me),
            spin_us(config) * 1000,
        )
        self._slots = [
            SlotTensors.of(self._endpoint, index, shape, dtype)
            for index, shape in enumerate(shapes)
        ]
        held = sum(w.bytes for w in weights)
        logger.info(
            "%s holds %d experts of %d layers, %.1f MiB, loaded in %.1f s",
            me.name,
            weights[0].w13.shape[0],
            len(weights),
            held / 2**20,
            time.monotonic() - start,
        )
        write_record(run_dir, ServerRecord.of(me, vllm_config, held, list(layers)))

    def run(self) -> None:
        """Serve until the board's stop word is set."""
        endpoint, backend = self._endpoint, self._backend
        timeout_ns = int(_IDLE_BEAT_S * 1e9)
        try:
            with torch.inference_mode():
                polled = 0
                while not endpoint.stopping:
                    ready = endpoint.wait(timeout_ns)
                    if ready:
                        backend.submit([self._operation(op) for op in ready])
                    if (now := time.monotonic_ns()) - polled >= timeout_ns:
                        endpoint.report(backend.poll())
                        polled = now
        finally:
            backend.close()

    def _operation(self, ready: ReadyOperation) -> Operation:
        slot = self._slots[ready.source]
        n = ready.tokens
        start = time.monotonic_ns()

        def complete() -> None:
            self._endpoint.complete(ready, time.monotonic_ns() - start)

        return Operation(
            self._sources[ready.source],
            ready.phase,
            ready.layer,
            slot.x[:n],
            slot.topk_ids[:n],
            slot.out[:n],
            complete,
        )


def threads(config: ExpertPlexConfig) -> int:
    """Threads that compute on this MoE server: as configured, or a fair share of the cores."""
    return config.moe_threads or fair_share(config)


def make_backend(
    me: Server, config: ExpertPlexConfig, layers: Sequence[ExpertWeights], dtype: torch.dtype
) -> Backend:
    """The configured backend over these layers, for activations of `dtype`.

    `auto` is the tile scheduler wherever it can compute the layers.
    """
    if config.moe_backend != "torch":
        from vllm_expertplex.moe_server.backend_tiles import TileOptions, TilesBackend

        torch.set_num_threads(1)  # the backend has worker threads of its own
        options = TileOptions(
            workers=threads(config),
            fifo=config.fifo,
            coalescing=config.coalescing,
            deadline_s=config.moe_timeout_s,
            trace=config.trace and trace_file(config.trace, me),
        )
        try:
            return TilesBackend(layers, options, dtype)
        except ValueError as error:
            if config.moe_backend == "tiles":
                raise
            logger.warning("%s: %s. Serving with the slower torch backend", me.name, error)
    from vllm_expertplex.moe_server.backend_torch import TorchBackend

    torch.set_num_threads(threads(config))
    return TorchBackend(layers)


def trace_file(path: str, me: Server) -> str:
    """`trace.json` -> `trace-moe-0.json`: one file per MoE server."""
    file = Path(path)
    return str(file.with_name(f"{file.stem}-{me.name}{file.suffix}"))
