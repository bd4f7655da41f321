"""The client of an AsyncEP deployment: which engine a request goes to, and when.

Owns: moving requests and outputs between the frontend's decisions and the engines' own clients.
Must not know: how the frontend decides, or how engines compute.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.stats import SchedulerStats

from vllm_expertplex.asyncep import tags
from vllm_expertplex.asyncep.deployment import AsyncEPDeployment
from vllm_expertplex.asyncep.frontend import Frontend, NoEngineLeft
from vllm_expertplex.client.engines import EnginesClient
from vllm_expertplex.client.failures import Failures
from vllm_expertplex.client.kv_events import KVEventListener, endpoint, keys_of
from vllm_expertplex.client.prefixes import PrefixIndex

logger = init_logger(__name__)


class _Message(NamedTuple):
    """To an engine: requests to add, or ids to abort."""

    engine: int
    content: list[Any]


class AsyncEPClient(EnginesClient):
    """Engine i is `deployment.engines[i]`."""

    def __init__(self, deployment: AsyncEPDeployment) -> None:
        super().__init__(deployment.engines)
        self.deployment = deployment
        engines = range(len(deployment.engines))
        config = deployment.config
        self.index = PrefixIndex(engines, deployment.block_size)
        self.frontend = Frontend(
            engines,
            deployment.flops,
            self.index,
            deployment.threshold.flops if config.frontend else 0.0,
            config.max_wait_ms / 1e3,
            deployment.step_tokens,
        )
        self._listeners = [
            KVEventListener(index, endpoint(deployment.run_dir, server), self.index)
            for index, server in enumerate(deployment.servers)
            if config.frontend and deployment.reuses_prefixes
        ]
        self._held: dict[str, EngineCoreRequest] = {}  # requests that no engine has been sent
        self._where: dict[str, int] = {}  # request -> the engine that was sent it
        self._outbox: asyncio.Queue[_Message] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._lost: str | None = None
        self.failures = Failures()
        self.batches = 0
        self.tokens = [0] * len(deployment.engines)  # prompt tokens answered, by engine
        self.cached_tokens = [0] * len(deployment.engines)  # of them, found in the KV cache

    # -- requests ------------------------------------------------------------------------------

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self.ensure_alive()
        self._held[request.request_id] = request
        self.frontend.submit(
            request.request_id,
            _prompt_length(request),
            keys_of(request, self.index) if self._listeners else [],
            time.monotonic(),
            tags.group_of(request),
        )
        self._release()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        sent: dict[int, list[str]] = {}
        for request_id in request_ids:
            self.frontend.drop(request_id)
            self._held.pop(request_id, None)
            engine = self._where.pop(request_id, None)
            if engine is not None:
                sent.setdefault(engine, []).append(request_id)
        for engine, ids in sent.items():
            self._outbox.put_nowait(_Message(engine, ids))
        self._release()

    def _release(self) -> None:
        """Hand what is due to the task that sends."""
        for batch in self.frontend.release(time.monotonic()):
            self.batches += 1
            requests = [self._held.pop(request_id) for request_id in batch.request_ids]
            for request in requests:
                self._where[request.request_id] = batch.engine
                if len(requests) > 1:
                    tags.set_batch(request, self.batches, len(requests))
            self._outbox.put_nowait(_Message(batch.engine, requests))
        self._changed.set()

    async def _deliver(self) -> None:
        """Send messages in order. One task does: a caller that is cancelled while it sends would
        leave half a batch behind.
        """
        while True:
            engine, content = await self._outbox.get()
            client = self.engines.get(engine)
            # What was for an engine that is gone was ended with its loss.
            with contextlib.suppress(EngineDeadError):
                if client is None:
                    continue
                if isinstance(content[0], str):
                    await client.abort_requests_async(content)
                    continue
                for request in content:
                    await client.add_request_async(request)

    async def _release_in_time(self) -> None:
        """Release what falls due while nothing else happens."""
        while True:
            self._changed.clear()
            now = time.monotonic()
            wake = self.frontend.wake_at(now)
            timeout = None if wake is None else max(0.0, wake - now)
            try:
                await asyncio.wait_for(self._changed.wait(), timeout)
            except TimeoutError:
                self._release()

    # -- outputs -------------------------------------------------------------------------------

    async def get_output_async(self) -> EngineCoreOutputs:
        index, event = await self.next_event()
        if isinstance(event, Exception):
            if index < 0:
                raise event
            outputs = self._lose(index, event)
        else:
            outputs = event
            outputs.engine_index = index
            for output in outputs.outputs:
                self._account(index, output)
        self._release()
        return outputs

    def _account(self, index: int, output: EngineCoreOutput) -> None:
        self.frontend.answered(output.request_id)
        if output.prefill_stats is not None:
            self.tokens[index] += output.prefill_stats.num_prompt_tokens
            self.cached_tokens[index] += output.prefill_stats.num_cached_tokens
        if output.finished:
            self._where.pop(output.request_id, None)

    def _lose(self, index: int, error: Exception) -> EngineCoreOutputs:
        """An engine is gone; what it had been sent ends with an error, the rest goes elsewhere."""
        name = self.deployment.servers[index].name
        if self.engines.pop(index, None) is None:
            return EngineCoreOutputs(engine_index=index)
        self.deployment.lost.add(name)
        try:
            if not self.engines:
                raise NoEngineLeft("no engine is left")
            self.frontend.lose(index, time.monotonic())
        except NoEngineLeft as none_left:
            self._lost = f"{name} is gone ({error}); {none_left}"
            logger.error("%s", self._lost)
            raise EngineDeadError(self._lost) from None
        ended = [request_id for request_id, engine in self._where.items() if engine == index]
        for request_id in ended:
            self.failures.add(request_id, f"{name} is gone")
            del self._where[request_id]
        logger.error("%s is gone (%s): %d requests end with an error", name, error, len(ended))
        # Zeros, so that `/metrics` does not show its last step for ever.
        return EngineCoreOutputs(
            engine_index=index,
            outputs=[
                EngineCoreOutput(r, new_token_ids=[], finish_reason=FinishReason.ERROR)
                for r in ended
            ],
            scheduler_stats=SchedulerStats(),
        )

    # -- health --------------------------------------------------------------------------------

    @property
    def failure(self) -> str | None:
        """Why nothing can be served any more; or None."""
        return self._lost

    def on_start(self, loop: asyncio.AbstractEventLoop) -> None:
        self.spawn(self._deliver())
        self.spawn(self._release_in_time())
        for listener in self._listeners:
            self.spawn(listener.run())

    def liveness(self, index: int) -> tuple[Callable[[], int], float]:
        board = self.deployment.boards[index]
        return lambda: board.read().layers, self.deployment.config.heartbeat_timeout_s

    def kill(self, index: int) -> None:
        self.deployment.kill(self.deployment.servers[index])

    def pending(self) -> int:
        return len(self._held) + len(self._where)

    def stop_servers(self) -> None:
        self.deployment.shutdown()


def _prompt_length(request: Any) -> int:
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    return 0 if request.prompt_embeds is None else len(request.prompt_embeds)
