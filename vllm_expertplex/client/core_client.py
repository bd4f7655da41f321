"""The client of an ExpertPlex deployment: one over all prefill and decode servers.

Owns: moving requests and outputs between the table of requests and the engines' own clients.
Must not know: what happens to a request when (`client/requests.py`), or transports.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.stats import SchedulerStats

from vllm_expertplex.client.engines import EnginesClient, Event
from vllm_expertplex.client.kv_events import KVEventListener, endpoint
from vllm_expertplex.client.prefixes import PrefixIndex
from vllm_expertplex.client.requests import Abort, Action, RequestTable
from vllm_expertplex.client.router import NoServerLeft
from vllm_expertplex.serve.deployment import Deployment

logger = init_logger(__name__)


class ExpertPlexClient(EnginesClient):
    """Engine i of the layout is `deployment.engines[i]`."""

    def __init__(self, deployment: Deployment, max_model_len: int) -> None:
        super().__init__(deployment.engines)
        self.deployment = deployment
        servers = deployment.layout.attention_servers
        prefixes = PrefixIndex(range(len(servers)), deployment.block_size)
        self._listeners = [
            KVEventListener(index, endpoint(deployment.run_dir, server), prefixes)
            for index, server in enumerate(servers)
            if deployment.says_what_it_caches(server)
        ]
        self.table = RequestTable(
            deployment.layout, max_model_len, prefixes if self._listeners else None
        )
        self._lost: str | None = None
        # Per engine: share of KV blocks in use at its last step, and tokens done (prompt tokens at
        # prefill servers, output tokens at decode servers).
        self.kv_usage = [0.0] * len(deployment.engines)
        self.tokens = [0] * len(deployment.engines)

    # -- requests ------------------------------------------------------------------------------

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self.ensure_alive()
        await self._do(self.table.add(request))

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        if request_ids and not self.resources.engine_dead:
            await self._do(self.table.abort(request_ids))

    async def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            engine = self.engines.get(action.engine)
            if engine is None:
                continue  # lost meanwhile, and with it what the action was for
            try:
                if isinstance(action, Abort):
                    await engine.abort_requests_async(action.request_ids)
                    if action.confirm:
                        self.spawn(self._confirm(engine, action.request_ids))
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
        self.queue.put_nowait(Event(-1, _Forget(request_ids)))

    # -- outputs -------------------------------------------------------------------------------

    async def get_output_async(self) -> EngineCoreOutputs:
        while True:
            # AsyncLLM has looked at all first tokens by now; stop strings have ended what they end.
            await self._do(self.table.hand_off())
            index, event = await self.next_event()
            if isinstance(event, _Forget):
                self.table.forget(event.request_ids)
            elif isinstance(event, Exception):
                if index < 0:
                    raise event
                return self._lose(index, event)
            else:
                return await self._translate(index, event)

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
        if self.engines.pop(index, None) is None:
            return EngineCoreOutputs(engine_index=index)
        if self.deployment.failure:  # the engine could not go on without its MoE server
            raise EngineDeadError(self.deployment.failure)
        try:
            ended = self.table.lose(index)
        except NoServerLeft as none_left:
            self._lost = f"{name} is gone ({error}); {none_left}"
            logger.error("%s", self._lost)
            raise EngineDeadError(self._lost) from None
        logger.error("%s is gone (%s): %d requests end with an error", name, error, len(ended))
        self.deployment.mark_lost(name)
        self.kv_usage[index] = 0.0
        # Zeros, so that `/metrics` does not show its last step for ever.
        return EngineCoreOutputs(
            engine_index=index, outputs=ended, scheduler_stats=SchedulerStats()
        )

    # -- health --------------------------------------------------------------------------------

    @property
    def failure(self) -> str | None:
        """Why nothing can be served any more, naming the server; or None."""
        return self.deployment.failure or self._lost

    def on_start(self, loop: asyncio.AbstractEventLoop) -> None:
        for listener in self._listeners:
            self.spawn(listener.run())

        def failed() -> None:
            error = EngineDeadError(self.deployment.failure)
            loop.call_soon_threadsafe(self.queue.put_nowait, Event(-1, error))

        self.deployment.on_failure(failed)

    def liveness(self, index: int) -> tuple[Callable[[], int], float]:
        deployment, config = self.deployment, self.deployment.config
        server = deployment.layout.attention_servers[index]
        # It may wait that long for a MoE server, whose fault that is then.
        patience_s = config.moe_timeout_s + config.heartbeat_timeout_s
        # On GPUs nothing is counted, and no step takes nearly as long as patience lasts.
        return lambda: deployment.layer_counters(server)["operations"], patience_s

    def kill(self, index: int) -> None:
        self.deployment.kill(self.deployment.layout.attention_servers[index].name)

    def pending(self) -> int:
        return len(self.table)

    def stop_servers(self) -> None:
        self.deployment.shutdown()


class _Forget(Exception):
    """In the queue: these aborts are dealt with."""

    def __init__(self, request_ids: list[str]) -> None:
        super().__init__(request_ids)
        self.request_ids = request_ids
