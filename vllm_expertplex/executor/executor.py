"""The executors of an attention server's engine: one worker in the engine's own process, or a
process for each tensor-parallel rank.

Owns: choosing the worker class. Must not know: MoE servers.

vLLM turns its own in-process executor off on CPU because OpenMP's environment must be set before
the process starts; the serve command does that, and an engine then needs one process, not two,
and no message queue on a decode step's path.
"""

import os
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from vllm_expertplex.config import ServerSettings, run_dir
from vllm_expertplex.layout import Server
from vllm_expertplex.serve import placement
from vllm_expertplex.serve.records import errors_written, read_ports

EXECUTOR = "vllm_expertplex.executor.executor.ExpertPlexExecutor"
TP_EXECUTOR = "vllm_expertplex.executor.executor.TensorParallelExecutor"


class _Attention:
    """In front of one of vLLM's executors: a prefill or decode server's."""

    vllm_config: Any
    parallel_config: Any
    _me: Server  # from when the executor starts

    def _init_executor(self) -> None:
        settings = ServerSettings.from_additional_config(self.vllm_config.additional_config)
        if settings is None:
            raise RuntimeError("ExpertPlexExecutor runs only under --executor expertplex")
        self._me = me = Server(settings.role, settings.rank)
        self.parallel_config.worker_cls = (
            "vllm_expertplex.executor.cpu_worker.AttentionCPUWorker"
            if current_platform.is_cpu()
            else "vllm_expertplex.executor.gpu_worker.AttentionGPUWorker"
        )
        with errors_written(run_dir(), me):
            placement.take(run_dir(), me)
            super()._init_executor()  # type: ignore[misc]

    def compile_or_warm_up_model(self) -> None:
        """Then vLLM makes the scheduler, and with it the KV connector, which reads its port from
        the environment. The port is another one in every start, and vLLM would compile a model
        again that it has compiled with another port in the environment.
        """
        super().compile_or_warm_up_model()  # type: ignore[misc]
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(read_ports(run_dir())[self._me.name])


class ExpertPlexExecutor(_Attention, UniProcExecutor):
    """Runs a server of one rank."""


class TensorParallelExecutor(_Attention, MultiprocExecutor):
    """Runs a server of several ranks. One that dies ends the engine, and so the server."""

    def _init_executor(self) -> None:
        # Ranks need the imports and the environment that this process has.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        super()._init_executor()

    def shutdown(self) -> None:
        if getattr(self, "is_failed", False):  # the others wait for the rank that died, deaf
            for worker in self.workers:
                worker.proc.kill()
        super().shutdown()
