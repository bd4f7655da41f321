"""The client of an AsyncEP deployment: which engine a request goes to, and when.

Owns: moving requests and outputs between the frontend's decisions and the engines' own clients.
Must not know: how the frontend decides, or how engines compute.
"""

from collections.abc import Callable

from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.stats import SchedulerStats

from vllm_expertplex.asyncep.deployment import AsyncEPDeployment
from vllm_expertplex.client.engines import EnginesClient
from vllm_expertplex.client.router import Router

logger = init_logger(__name__)


class AsyncEPClient(EnginesClient):
    """Engine i is `deployment.engines[i]`."""

    def __init__(self, deployment: AsyncEPDeployment) -> None:
        super().__init__(deployment.engines)
        self.deployment = deployment
        self._router = Router("engine", range(len(deployment.engines)))
        self._where: dict[str, tuple[int, int]] = {}
        self._lost: str | None = None

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self.ensure_alive()
        load = len(request.prompt_token_ids or [])
        engine = self._router.take(load)
        self._where[request.request_id] = (engine, load)
        await self.engines[engine].add_request_async(request)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            engine, _ = self._where.get(request_id, (-1, 0))
            if engine in self.engines:
                await self.engines[engine].abort_requests_async([request_id])

    async def get_output_async(self) -> EngineCoreOutputs:
        index, event = await self.next_event()
        if isinstance(event, Exception):
            return self._lose(index, event)
        event.engine_index = index
        for output in event.outputs:
            if output.finished:
                self._router.release(*self._where.pop(output.request_id))
        return event

    def _lose(self, index: int, error: Exception) -> EngineCoreOutputs:
        name = self.deployment.servers[index].name
        if self.engines.pop(index, None) is None:
            return EngineCoreOutputs(engine_index=index)
        self._router.remove(index)
        if not self.engines:
            self._lost = f"{name} is gone ({error}); no engine is left"
            raise EngineDeadError(self._lost)
        self.deployment.lost.add(name)
        ended = [r for r, (engine, _) in self._where.items() if engine == index]
        logger.error("%s is gone (%s): %d requests end with an error", name, error, len(ended))
        outputs = [
            EngineCoreOutput(r, new_token_ids=[], finish_reason=FinishReason.ERROR) for r in ended
        ]
        return EngineCoreOutputs(
            engine_index=index, outputs=outputs, scheduler_stats=SchedulerStats()
        )

    @property
    def failure(self) -> str | None:
        return self._lost

    def liveness(self, index: int) -> tuple[Callable[[], int], float]:
        board = self.deployment.boards[index]
        return lambda: board.read().layers, self.deployment.config.heartbeat_timeout_s

    def kill(self, index: int) -> None:
        self.deployment.kill(self.deployment.servers[index])

    def pending(self) -> int:
        return len(self._where)

    def stop_servers(self) -> None:
        self.deployment.shutdown()
