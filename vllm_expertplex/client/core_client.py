"""One engine-core client over all prefill and decode servers; vLLM's AsyncLLM above it is stock.

Owns: moving requests and outputs between the table of requests and the engines' own clients.
Must not know: what happens to a request when (`client/requests.py`), or transports.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from vllm.config.kv_events import KVEventsConfig
from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.stats import SchedulerStats

from vllm_expertplex.client.liveness import silence
from vllm_expertplex.client.requests import Abort, Action, RequestTable
from vllm_expertplex.client.router import NoServerLeft
from vllm_expertplex.serve.deployment import Deployment

logger = init_logger(__name__)

# Calls that go to every live engine; the answers of those that return bool are and-ed.
_EVERYWHERE = (
    "reset_prefix_cache_async",
    "reset_mm_cache_async",
    "reset_encoder_cache_async",
    "pause_scheduler_async",
    "resume_scheduler_async",
    "is_scheduler_paused_async",
    "profile_async",
    "collective_rpc_async",
    "is_sleeping_async",
    "set_weight_version_async",
    "get_weight_version_async",
)


class _Resources:
    """What AsyncLLM reads as `engine_core.resources`."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self.lost: str | None = None

    @property
    def engine_dead(self) -> bool:
        return self.lost is not None or self._deployment.failure is not None


class ExpertPlexClient(EngineCoreClient):
    """Engine i of the layout is `deployment.engines[i]`; metrics carry i as `engine`."""

    def __init__(self, deployment: Deployment, max_model_len: int) -> None:
        self.deployment = deployment
        self.table = RequestTable(deployment.layout, max_model_len)
        self.resources = _Resources(deployment)
        self.engine_ranks_managed = list(range(len(deployment.engines)))
        self._engines = dict(enumerate(deployment.engines))
        # Per engine: share of KV blocks in use at its last step, and tokens done (prompt tokens at
        # prefill servers, output tokens at decode servers).
        self.kv_usage = [0.0] * len(deployment.engines)
        self.tokens = [0] * len(deployment.engines)
        self._queue: asyncio.Queue[tuple[int, EngineCoreOutputs | Exception]] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pumping = False

    # -- requests ------------------------------------------------------------------------------

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self._ensure_alive()
        await self._do(self.table.add(request))

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        if request_ids and not self.resources.engine_dead:
            await self._do(self.table.abort(request_ids))

    async def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            engine = self._engines.get(action.engine)
            if engine is None:
                continue  # lost meanwhile, and with it what the action was for
            try:
                if isinstance(action, Abort):
                    await engine.abort_requests_async(action.request_ids)
                    if action.confirm:
                        self._spawn(self._confirm(engine, action.request_ids))
                else:
                    await engine.add_request_async(action.request)
            except EngineDeadError:
                # Its pump reports the loss, which ends the requests it held.
                logger.debug("engine %d is gone; dropped %r", action.engine, type(action))

    async def _confirm(self, engine: Any, request_ids: list[str]) -> None:
        """An engine answers calls in order, and after outputs that preceded them."""
        try:
            await engine.call_utility_async("is_scheduler_paused")
        except EngineDeadError:
            return  # its pump reports the loss, which forgets its requests
        # Outputs that came before the answer are in the queue already; go behind them.
        self._queue.put_nowait((-1, _Forget(request_ids)))

    # -- outputs -------------------------------------------------------------------------------

    async def get_output_async(self) -> EngineCoreOutputs:
        self._start_pumps()
        while True:
            # AsyncLLM has looked at all first tokens by now; stop strings have ended what they end.
            await self._do(self.table.hand_off())
            index, outputs = await self._queue.get()
            if isinstance(outputs, _Forget):
                self.table.forget(outputs.request_ids)
            elif isinstance(outputs, Exception):
                if index < 0:
                    raise outputs
                return self._lose(index, outputs)
            else:
                return await self._translate(index, outputs)

    async def _translate(self, index: int, outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        outputs.engine_index = index
        if outputs.scheduler_stats is not None:
            self.kv_usage[index] = outputs.scheduler_stats.kv_cache_usage
        shown = []
        for output in outputs.outputs:
            stats = output.prefill_stats
            prefill = index < self.deployment.layout.prefill
            if not prefill:
                self.tokens[index] += len(output.new_token_ids)
            elif stats is not None:
                self.tokens[index] += stats.num_prompt_tokens
            visible, actions = self.table.output(index, output)
            if visible is not None:
                shown.append(visible)
            await self._do(actions)
        outputs.outputs = shown
        return outputs

    def _lose(self, index: int, error: Exception) -> EngineCoreOutputs:
        """An engine is gone; its requests end with an error, or everything does."""
        name = self.deployment.layout.attention_servers[index].name
        if self._engines.pop(index, None) is None:
            return EngineCoreOutputs(engine_index=index)
        if self.deployment.failure:  # the engine could not go on without its MoE server
            raise EngineDeadError(self.deployment.failure)
        try:
            ended = self.table.lose(index)
        except NoServerLeft as none_left:
            self.resources.lost = f"{name} is gone ({error}); {none_left}"
            logger.error("%s", self.resources.lost)
            raise EngineDeadError(self.resources.lost) from None
        logger.error("%s is gone (%s): %d requests end with an error", name, error, len(ended))
        self.deployment.mark_lost(name)
        self.kv_usage[index] = 0.0
        # Zeros, so that `/metrics` does not show its last step for ever.
        return EngineCoreOutputs(
            engine_index=index, outputs=ended, scheduler_stats=SchedulerStats()
        )

    def _start_pumps(self) -> None:
        if self._pumping:
            return
        self._pumping = True
        for index, engine in self._engines.items():
            self._spawn(self._pump(index, engine))
            self._spawn(self._watch(index, engine))
        loop = asyncio.get_running_loop()

        def failed() -> None:
            error = EngineDeadError(self.deployment.failure)
            loop.call_soon_threadsafe(self._queue.put_nowait, (-1, error))

        self.deployment.on_failure(failed)

    async def _pump(self, index: int, engine: Any) -> None:
        while True:
            try:
                self._queue.put_nowait((index, await engine.get_output_async()))
            except Exception as error:
                self._queue.put_nowait((index, error))
                return

    async def _watch(self, index: int, engine: Any) -> None:
        """A server that lives without progress is lost like one that died."""
        deployment, config = self.deployment, self.deployment.config
        name = deployment.layout.attention_servers[index].name
        slot = deployment.slots[name, deployment.layout.moe_servers[0].name]
        # It may wait that long for a MoE server, whose fault that is then.
        patience_s = config.moe_timeout_s + config.heartbeat_timeout_s
        try:
            await silence(engine, lambda: slot.counters()["operations"], patience_s)
        except EngineDeadError:
            return  # its pump reports the loss
        self._queue.put_nowait((index, TimeoutError(f"no progress for {patience_s:g} s")))
        deployment.kill(name)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- everything else -----------------------------------------------------------------------

    @property
    def failure(self) -> str | None:
        """Why nothing can be served any more, naming the server; or None."""
        return self.deployment.failure or self.resources.lost

    def _ensure_alive(self) -> None:
        if self.resources.engine_dead:
            raise EngineDeadError(self.failure)

    async def get_supported_tasks_async(self) -> Any:
        return await next(iter(self._engines.values())).get_supported_tasks_async()

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        return await self._everywhere("call_utility_async", method, *args)

    async def _everywhere(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self._ensure_alive()
        calls = [getattr(engine, method)(*args, **kwargs) for engine in self._engines.values()]
        answers = await asyncio.gather(*calls)
        if all(isinstance(answer, bool) for answer in answers):
            return all(answers)
        if all(isinstance(answer, list) for answer in answers):
            return [item for answer in answers for item in answer]
        return answers[-1]

    def get_kv_event_sources(self) -> dict[int, KVEventsConfig]:
        return {}

    def dp_engines_running(self) -> bool:
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        for task in self._tasks:
            task.cancel()
        self.deployment.shutdown(timeout)


class _Forget(Exception):
    """In the queue: these aborts are dealt with."""

    def __init__(self, request_ids: list[str]) -> None:
        super().__init__(request_ids)
        self.request_ids = request_ids


def _fan_out(name: str) -> Callable[..., Awaitable[Any]]:
    async def call(self: ExpertPlexClient, *args: Any, **kwargs: Any) -> Any:
        return await self._everywhere(name, *args, **kwargs)

    call.__name__ = name
    return call


for _name in _EVERYWHERE:
    setattr(ExpertPlexClient, _name, _fan_out(_name))
