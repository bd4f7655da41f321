"""When an attention server's silence counts as its death."""

import asyncio

import pytest

from vllm_expertplex.client.liveness import silence

PATIENCE_S = 0.2


class Engine:
    """Answers at once, or never while frozen."""

    def __init__(self) -> None:
        self.frozen = False
        self.steps = 0
        self.dead: Exception | None = None

    async def call_utility_async(self, method: str) -> bool:
        while self.frozen:
            await asyncio.sleep(0.01)
        if self.dead is not None:
            raise self.dead
        return False


def run(scenario) -> None:  # type: ignore[no-untyped-def]
    async def main() -> None:
        engine = Engine()
        watch = asyncio.create_task(silence(engine, lambda: engine.steps, PATIENCE_S))
        await scenario(engine, watch)
        watch.cancel()

    asyncio.run(main())


def test_an_engine_that_answers_is_alive() -> None:
    async def scenario(engine: Engine, watch: asyncio.Task[None]) -> None:
        await asyncio.sleep(3 * PATIENCE_S)
        assert not watch.done()

    run(scenario)


def test_a_long_step_that_makes_progress_is_alive_and_one_that_does_not_is_silence() -> None:
    async def scenario(engine: Engine, watch: asyncio.Task[None]) -> None:
        engine.frozen = True
        for _ in range(12):
            engine.steps += 1
            await asyncio.sleep(PATIENCE_S / 4)
            assert not watch.done()
        await asyncio.wait_for(watch, 10 * PATIENCE_S)

    run(scenario)


def test_a_dead_engine_is_its_clients_error() -> None:
    async def scenario(engine: Engine, watch: asyncio.Task[None]) -> None:
        engine.dead = RuntimeError("engine dead")
        with pytest.raises(RuntimeError, match="engine dead"):
            await asyncio.wait_for(watch, 10 * PATIENCE_S)

    run(scenario)
