"""The worker of an engine on a GPU: vLLM's GPU worker over memory that peers read."""

import torch
from vllm.v1.worker.gpu_worker import Worker

from vllm_expertplex.asyncep.cuda_memory import CudaMemory, PinnedMemory
from vllm_expertplex.asyncep.memory import Memory
from vllm_expertplex.asyncep.worker import AsyncEPWorker


class AsyncEPGPUWorker(AsyncEPWorker, Worker):
    """One engine's worker."""

    def memories(self) -> tuple[Memory, Memory]:
        return CudaMemory(), PinnedMemory()

    def synchronize(self) -> None:
        torch.cuda.synchronize()
