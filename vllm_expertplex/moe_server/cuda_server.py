"""A MoE server on a GPU: loads experts, starts the resident kernel, then only watches it.

Owns: the life of such a server. Must not know: operations, requests, other MoE servers.

The process sees its own GPU alone. It writes into the attention servers' memory all the same: what
CUDA IPC has opened needs no visible device.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from vllm.config import VllmConfig
from vllm.logger import init_logger

from vllm_expertplex._comm import MoeEndpoint
from vllm_expertplex.comm.shm import board_path
from vllm_expertplex.config import ExpertPlexConfig
from vllm_expertplex.layout import Server
from vllm_expertplex.moe_server.backend_cuda import CudaBackend
from vllm_expertplex.moe_server.load import load_layers
from vllm_expertplex.serve.records import ServerRecord, write_record
from vllm_expertplex.shapes import expert_map, gpu_slot, slot_configs, slot_owners

logger = init_logger(__name__)

# How often the loop looks at the kernel, and shows on the board that it is alive.
_BEAT_NS = 250_000_000


class CudaMoeServer:
    """The experts of one server, and the slots of all attention servers in its GPU's memory."""

    def __init__(
        self,
        run_dir: Path,
        me: Server,
        config: ExpertPlexConfig,
        vllm_configs: Sequence[VllmConfig],
    ) -> None:
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        self._me, layout, vllm_config = me, config.parsed_layout, vllm_configs[0]
        start = time.monotonic()
        layers = load_layers(vllm_config, expert_map(vllm_config, layout).local_experts(me.rank))
        weights = list(layers.values())
        held = sum(w.bytes for w in weights)
        logger.info(
            "%s holds %d experts of %d layers, %.1f GiB, loaded in %.1f s",
            me.name,
            weights[0].w13.shape[0],
            len(weights),
            held / 2**30,
            time.monotonic() - start,
        )
        # No operation passes through the board; it carries heartbeat, stop word and counters.
        self._endpoint = MoeEndpoint([], [], board_path(run_dir, me), 0)
        layouts = [gpu_slot(c, o.microbatch) for o, c in slot_configs(config, vllm_configs)]
        self._backend = CudaBackend(
            run_dir,
            me,
            weights,
            slot_owners(config),
            layouts,
            config.moe_timeout_s,
            decode_sms=config.decode_sms,
            expected_x_moe=config.expected_x_moe,
            fifo=config.fifo,
            coalescing=config.coalescing,
        )
        self._backend.start(config.startup_timeout_s)
        logger.info("%s: the kernel is running", me.name)
        write_record(run_dir, ServerRecord.of(me, vllm_config, held, list(layers)))

    def run(self) -> None:
        """Serve until the board's stop word is set."""
        endpoint = self._endpoint
        try:
            while not endpoint.stopping:
                counters, warning = self._backend.poll()
                endpoint.report(counters)
                if warning:
                    logger.warning("%s: %s", self._me.name, warning)
                endpoint.wait(_BEAT_NS)  # sleeps, and beats on the board
        finally:
            self._backend.close()
