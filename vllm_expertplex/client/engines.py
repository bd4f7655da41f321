"""One engine-core client over several engines; vLLM's AsyncLLM above it is stock.

Owns: taking outputs from all engines into one queue, noticing silent ones, calls that go to all.
Must not know: which engine a request goes to, or what an engine is for.
"""

import asyncio
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from vllm.config.kv_events import KVEventsConfig
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_expertplex.client.liveness import silence

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

# Of them, those in which an engine may be silent for minutes: it writes a trace, or loads weights.
_LONG = ("profile_async", "collective_rpc_async")

_CLOSING = "the server is shutting down"


class Event(NamedTuple):
    """Something from an engine, or from nobody in particular (-1)."""

    engine: int
    what: Any  # EngineCoreOutputs, an Exception, or what a subclass put there


class _Resources:
    """What AsyncLLM reads as `engine_core.resources`."""

    def __init__(self, failure: Callable[[], str | None]) -> None:
        self._failure = failure

    @property
    def engine_dead(self) -> bool:
        return self._failure() is not None


class EnginesClient(EngineCoreClient):
    """Engine i is `engines[i]`; vLLM's metrics carry i as `engine`."""

    def __init__(self, engines: Sequence[Any]) -> None:
        self.resources = _Resources(lambda: self.failure)
        self.engine_ranks_managed = list(range(len(engines)))
        self.engines: dict[int, Any] = dict(enumerate(engines))  # the live ones
        self.queue: asyncio.Queue[Event] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pumps: dict[int, asyncio.Task[None]] = {}  # each ends with its engine
        self._loop: asyncio.AbstractEventLoop | None = None  # once outputs are asked for
        self._closing = False
        self._long_calls = 0  # in progress

    @property
    @abstractmethod
    def failure(self) -> str | None:
        """Why nothing can be served any more; None while it can."""

    @abstractmethod
    def liveness(self, index: int) -> tuple[Callable[[], int], float]:
        """What grows while engine `index` makes progress, and seconds it may stand still."""

    @abstractmethod
    def pending(self) -> int:
        """How many requests have not ended."""

    @abstractmethod
    def stop_servers(self) -> None:
        """End every process of the deployment, at once but in order."""

    @abstractmethod
    def kill(self, index: int) -> None:
        """End an engine that does not react any more."""

    async def next_event(self) -> Event:
        """The next output, loss or other event. Starts listening with the first call."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            for index, engine in self.engines.items():
                self._pumps[index] = self.spawn(self._pump(index, engine))
                self.spawn(self._watch(index, engine))
            self.on_start(self._loop)
        return await self.queue.get()

    def on_start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Called once, when listening begins."""

    async def _pump(self, index: int, engine: Any) -> None:
        while True:
            try:
                outputs: EngineCoreOutputs = await engine.get_output_async()
                self.queue.put_nowait(Event(index, outputs))
            except Exception as error:
                self.queue.put_nowait(Event(index, error))
                return

    async def _watch(self, index: int, engine: Any) -> None:
        """An engine that lives without progress is lost like one that died."""
        progress, patience_s = self.liveness(index)

        def progress_or_excused() -> int:
            return time.monotonic_ns() if self._long_calls else progress()

        try:
            await silence(engine, progress_or_excused, patience_s)
        except EngineDeadError:
            return  # its pump reports the loss
        if index not in self.engines:
            return  # it died, and its process id may be another's by now
        self.queue.put_nowait(Event(index, TimeoutError(f"no progress for {patience_s:g} s")))
        self.kill(index)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` beside everything else, until the end."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def ensure_alive(self) -> None:
        if self._closing:
            raise EngineDeadError(_CLOSING)
        if self.resources.engine_dead:
            raise EngineDeadError(self.failure)

    async def get_supported_tasks_async(self) -> Any:
        return await next(iter(self.engines.values())).get_supported_tasks_async()

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        return await self._everywhere("call_utility_async", method, *args)

    async def _everywhere(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.ensure_alive()
        calls = [
            self._answer(index, getattr(engine, method)(*args, **kwargs))
            for index, engine in self.engines.items()
        ]
        self._long_calls += method in _LONG
        try:
            answers = await asyncio.gather(*calls)
        finally:
            self._long_calls -= method in _LONG
        if all(isinstance(answer, bool) for answer in answers):
            return all(answers)
        if all(isinstance(answer, list) for answer in answers):
            return [item for answer in answers for item in answer]
        return answers[-1]

    async def _answer(self, index: int, call: Awaitable[Any]) -> Any:
        """What engine `index` answers. Raises EngineDeadError where it dies before it does, for
        which its own client would wait for ever.
        """
        asked = asyncio.ensure_future(call)
        pump = self._pumps.get(index)
        try:
            await asyncio.wait({asked, pump} if pump else {asked}, return_when="FIRST_COMPLETED")
            if not asked.done():
                raise EngineDeadError(f"engine {index} died before it answered")
            return asked.result()
        finally:
            asked.cancel()

    def get_kv_event_sources(self) -> dict[int, KVEventsConfig]:
        return {}

    def dp_engines_running(self) -> bool:
        return False

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop every server; called from a thread beside the event loop, or after it.

        Requests have `timeout` seconds to end by themselves. Engines could not drain on their own:
        what one of them finishes may have to be handed to another. What is left then ends with an
        error, so that no client keeps the HTTP server waiting.
        """
        self._closing = True
        deadline = time.monotonic() + (timeout or 0)
        while self.pending() and time.monotonic() < deadline and self.failure is None:
            time.sleep(0.05)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end)
        self.stop_servers()

    def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self.pending():
            self.queue.put_nowait(Event(-1, EngineDeadError(_CLOSING)))


def _fan_out(name: str) -> Callable[..., Awaitable[Any]]:
    async def call(self: EnginesClient, *args: Any, **kwargs: Any) -> Any:
        return await self._everywhere(name, *args, **kwargs)

    call.__name__ = name
    return call


for _name in _EVERYWHERE:
    setattr(EnginesClient, _name, _fan_out(_name))
