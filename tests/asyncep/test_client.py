"""The client against engines that only record: whole batches, aborts behind them, losses."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_expertplex.asyncep import tags
from vllm_expertplex.asyncep.board import Board
from vllm_expertplex.asyncep.client import AsyncEPClient
from vllm_expertplex.asyncep.config import AsyncEPConfig
from vllm_expertplex.asyncep.flops import Flops
from vllm_expertplex.planner.model_configs import load_model

_MODEL = load_model("qwen3-235b-a22b")


class _Engine:
    """Stands in for vLLM's AsyncMPClient."""

    def __init__(self) -> None:
        self.log: list[Any] = []  # ids added, and lists of ids aborted
        self.requests: dict[str, EngineCoreRequest] = {}
        self.outputs: asyncio.Queue[Any] = asyncio.Queue()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        await asyncio.sleep(0)  # as a socket may
        self.log.append(request.request_id)
        self.requests[request.request_id] = request

    async def abort_requests_async(self, ids: list[str]) -> None:
        self.log.append(ids)

    async def get_output_async(self) -> EngineCoreOutputs:
        found = await self.outputs.get()
        if isinstance(found, Exception):
            raise found
        return found

    async def call_utility_async(self, method: str) -> bool:
        return False

    def answer(self, *ids: str) -> None:
        done = [EngineCoreOutput(i, [1], finish_reason=FinishReason.LENGTH) for i in ids]
        self.outputs.put_nowait(EngineCoreOutputs(outputs=done))


def _request(name: str, tokens: int = 100) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=[hash(name) % 999] * tokens,
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


Body = Callable[[AsyncEPClient, list[_Engine]], Awaitable[None]]


def _run(tmp_path: Path, body: Body, engines: int = 2, threshold_tokens: float = 250) -> None:
    async def run() -> None:
        config = AsyncEPConfig(gpus=engines, max_wait_ms=50.0)
        made = [_Engine() for _ in range(engines)]
        flops = Flops(_MODEL)
        deployment = SimpleNamespace(
            engines=made,
            servers=config.servers,
            config=config,
            flops=flops,
            threshold=SimpleNamespace(flops=threshold_tokens * flops.per_token),
            step_tokens=0,
            block_size=16,
            reuses_prefixes=False,
            boards=[Board(tmp_path, server, create=True) for server in config.servers],
            lost=set(),
            shutdown=lambda: None,
        )
        client = AsyncEPClient(deployment)  # type: ignore[arg-type]
        listening = asyncio.ensure_future(_listen(client))
        await asyncio.sleep(0)
        try:
            await asyncio.wait_for(body(client, made), 20)
        finally:
            listening.cancel()
            client.shutdown()
            await asyncio.sleep(0)

    asyncio.run(run())


_seen: list[EngineCoreOutput] = []


async def _listen(client: AsyncEPClient) -> None:
    """What AsyncLLM does."""
    _seen.clear()
    while True:
        _seen.extend((await client.get_output_async()).outputs)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(1e-3)


def test_batches_are_marked_and_sent_whole(tmp_path: Path) -> None:
    async def body(client: AsyncEPClient, engines: list[_Engine]) -> None:
        await client.add_request_async(_request("first"))
        await _until(lambda: bool(engines[0].log))
        for i in range(3):
            await client.add_request_async(_request(f"r{i}"))
        await _until(lambda: len(engines[0].log) == 4)
        assert engines[0].log == ["first", "r0", "r1", "r2"]
        marks = {tags.batch_of(engines[0].requests[f"r{i}"]) for i in range(3)}
        assert len(marks) == 1
        assert next(iter(marks))[1] == 3  # type: ignore[index]
        assert tags.batch_of(engines[0].requests["first"]) is None

    _run(tmp_path, body, engines=1)


def test_a_caller_that_goes_away_does_not_tear_a_batch(tmp_path: Path) -> None:
    async def body(client: AsyncEPClient, engines: list[_Engine]) -> None:
        await client.add_request_async(_request("first"))
        await client.add_request_async(_request("r0"))
        await client.add_request_async(_request("r1"))
        caller = asyncio.ensure_future(client.add_request_async(_request("r2")))
        await asyncio.sleep(0)
        caller.cancel()
        await _until(lambda: len(engines[0].log) == 4)

    _run(tmp_path, body, engines=1)


def test_an_abort_follows_what_it_aborts_and_held_requests_just_go(tmp_path: Path) -> None:
    async def body(client: AsyncEPClient, engines: list[_Engine]) -> None:
        await client.add_request_async(_request("sent"))
        await client.add_request_async(_request("held"))
        await client.abort_requests_async(["held", "sent", "unknown"])
        await _until(lambda: len(engines[0].log) >= 2)
        assert engines[0].log == ["sent", ["sent"]]
        assert client.pending() == 0

    _run(tmp_path, body, engines=1)


def test_the_deadline_releases_without_any_event(tmp_path: Path) -> None:
    async def body(client: AsyncEPClient, engines: list[_Engine]) -> None:
        for i in range(20):  # enough load that waiting for T makes sense
            await client.add_request_async(_request(f"w{i}"))
        await _until(lambda: len(engines[0].log) >= 3)
        while client.pending():
            engines[0].answer(*[i for i in engines[0].log if i in client._where])
            await asyncio.sleep(5e-3)
        await client.add_request_async(_request("alone"))
        assert "alone" not in engines[0].log
        await _until(lambda: "alone" in engines[0].log)

    _run(tmp_path, body, engines=1)


def test_a_lost_engine_ends_what_it_was_sent_and_gives_back_the_rest(tmp_path: Path) -> None:
    async def body(client: AsyncEPClient, engines: list[_Engine]) -> None:
        for i in range(12):
            await client.add_request_async(_request(f"r{i}"))
        await _until(lambda: sum(len(e.log) for e in engines) >= 6)
        sent = list(engines[1].log)
        engines[1].outputs.put_nowait(EngineDeadError())
        await _until(lambda: len(_seen) >= len(sent))
        assert {output.request_id for output in _seen} == set(sent)
        assert all(output.finish_reason == FinishReason.ERROR for output in _seen)
        assert client.failures.reason(sent[0]) == "asyncep-1 is gone"
        while client.pending():
            engines[0].answer(*[i for i in engines[0].log if i in client._where])
            await asyncio.sleep(1e-3)
        assert {*engines[0].log, *sent} == {f"r{i}" for i in range(12)}
        engines[0].outputs.put_nowait(EngineDeadError())
        await _until(lambda: client.failure is not None)
        with pytest.raises(EngineDeadError):
            await client.add_request_async(_request("late"))

    _run(tmp_path, body)
