"""One client over several engines, of which one dies or falls silent meanwhile."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_expertplex.client.engines import EnginesClient

PATIENCE_S = 0.1


class Engine:
    """Stands in for vLLM's AsyncMPClient, whose calls nobody answers once the engine is dead."""

    def __init__(self) -> None:
        self.outputs: asyncio.Queue[Exception] = asyncio.Queue()
        self.silent, self.answer = False, asyncio.Event()

    async def get_output_async(self) -> EngineCoreOutputs:
        raise await self.outputs.get()

    async def call_utility_async(self, method: str) -> bool:
        if self.silent:
            await self.answer.wait()
        return True

    async def profile_async(self, is_start: bool) -> None:
        """Writes a trace, and does nothing else meanwhile."""
        self.silent = True
        await asyncio.sleep(PATIENCE_S * 6)
        self.silent = False
        self.answer.set()

    def die(self) -> None:
        self.silent = True
        self.outputs.put_nowait(EngineDeadError())


class Client(EnginesClient):
    """Takes lost engines out, as a deployment's client does."""

    def __init__(self, engines: list[Engine]) -> None:
        super().__init__(engines)
        self.killed: list[int] = []
        self.lost: list[int] = []

    failure = None  # type: ignore[assignment]

    def liveness(self, index: int) -> tuple[Callable[[], int], float]:
        return lambda: 0, PATIENCE_S

    def pending(self) -> int:
        return 0

    def stop_servers(self) -> None: ...

    def kill(self, index: int) -> None:
        self.killed.append(index)

    async def listen(self) -> None:
        while True:
            index, _ = await self.next_event()
            if self.engines.pop(index, None) is not None:
                self.lost.append(index)


def run(scenario: Callable[[Client, list[Engine]], Awaitable[None]]) -> None:
    async def main() -> None:
        engines = [Engine(), Engine()]
        client = Client(engines)
        listening = asyncio.ensure_future(client.listen())
        await asyncio.sleep(0)
        await asyncio.wait_for(scenario(client, engines), 20)
        listening.cancel()
        client.shutdown()
        await asyncio.sleep(0)

    asyncio.run(main())


def test_a_call_to_all_ends_when_one_dies_before_it_answers() -> None:
    async def scenario(client: Client, engines: list[Engine]) -> None:
        engines[1].silent = True
        asked: asyncio.Future[Any] = asyncio.ensure_future(client.call_utility_async("anything"))
        await asyncio.sleep(0)
        engines[1].die()
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(asked, PATIENCE_S * 50)
        assert await client.call_utility_async("anything") is True  # the others go on

    run(scenario)


def test_an_engine_that_died_is_not_killed_later_for_its_silence() -> None:
    """Its process id may be somebody else's by then."""

    async def scenario(client: Client, engines: list[Engine]) -> None:
        engines[0].die()
        await asyncio.sleep(PATIENCE_S * 6)
        assert client.lost == [0]
        assert client.killed == []

    run(scenario)


def test_an_engine_that_writes_its_profile_is_not_killed_for_its_silence() -> None:
    async def scenario(client: Client, engines: list[Engine]) -> None:
        await client.profile_async(False)  # type: ignore[attr-defined]
        assert client.killed == []
        engines[1].silent = True
        engines[1].answer.clear()
        while not client.lost:
            await asyncio.sleep(PATIENCE_S / 4)
        assert client.killed == [1]

    run(scenario)


def test_a_silent_engine_is_killed_once_and_lost() -> None:
    async def scenario(client: Client, engines: list[Engine]) -> None:
        engines[1].silent = True
        while not client.lost:
            await asyncio.sleep(PATIENCE_S / 4)
        engines[1].die()
        await asyncio.sleep(PATIENCE_S * 4)
        assert client.lost == [1]
        assert client.killed == [1]

    run(scenario)
