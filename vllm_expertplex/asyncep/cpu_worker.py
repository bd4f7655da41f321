"""The worker of an engine on CPU: vLLM's CPU worker over shared memory."""

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_expertplex.asyncep.memory import HostMemory, Memory
from vllm_expertplex.asyncep.worker import AsyncEPWorker


class AsyncEPCPUWorker(AsyncEPWorker, CPUWorker):
    """One engine's worker."""

    def memories(self) -> tuple[Memory, Memory]:
        memory = HostMemory()
        return memory, memory
