"""The executor of an engine: one worker, in the engine's own process.

Owns: choosing the worker class. Must not know: weights.
"""

from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from vllm_expertplex.asyncep.config import AsyncEPSettings
from vllm_expertplex.config import run_dir
from vllm_expertplex.serve import placement
from vllm_expertplex.serve.records import errors_written

EXECUTOR = "vllm_expertplex.asyncep.executor.AsyncEPExecutor"


class AsyncEPExecutor(UniProcExecutor):
    """Runs one engine of `--executor asyncep`."""

    def _init_executor(self) -> None:
        settings = AsyncEPSettings.from_additional_config(self.vllm_config.additional_config)
        if settings is None:
            raise RuntimeError("AsyncEPExecutor runs only under --executor asyncep")
        self.parallel_config.worker_cls = (
            "vllm_expertplex.asyncep.cpu_worker.AsyncEPCPUWorker"
            if current_platform.is_cpu()
            else "vllm_expertplex.asyncep.gpu_worker.AsyncEPGPUWorker"
        )
        with errors_written(run_dir(), settings.server):
            placement.take(run_dir(), settings.server)
            super()._init_executor()
