"""Requests at a server from many clients at once, some of which go away.

Owns: sending streamed completions, hanging up, and what each client saw.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx
import msgspec

from tests.e2e.server import MODEL_NAME


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One client: what it asks, when it starts, and when it hangs up (None: never)."""

    body: Mapping[str, Any]
    start_s: float = 0.0
    cut_after_s: float | None = None
    cut_after_chunks: int | None = None


class Outcome(msgspec.Struct):
    """What a client saw. `ended` is a time of `time.monotonic()`."""

    status: int = 0
    chunks: int = 0
    finished: int = 0  # choices that came to their end
    error: str | None = None
    cut: bool = False
    ended: float = 0.0


class Traffic:
    """Sends all `requests` from a thread of its own; `outcomes` fill while it runs."""

    def __init__(self, port: int, requests: Sequence[Request]) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self._requests = requests
        self.outcomes = [Outcome() for _ in requests]
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    def wait_until(self, condition: Callable[[], bool], deadline_s: float, what: str) -> None:
        """Poll `condition`; fails the test, naming `what` was waited for, at the deadline."""
        deadline = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {deadline_s:g} s"
            time.sleep(0.01)

    def join(self, deadline_s: float) -> None:
        """Wait until every client is through; fails the test at the deadline."""
        self._thread.join(deadline_s)
        open_ones = sum(outcome.ended == 0 for outcome in self.outcomes)
        assert not self._thread.is_alive(), f"{open_ones} clients still wait after {deadline_s:g} s"

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self._url, timeout=None, limits=limits, trust_env=False
        ) as http:
            pairs = zip(self._requests, self.outcomes, strict=True)
            await asyncio.gather(*(_client(http, *pair) for pair in pairs))


async def _client(http: httpx.AsyncClient, request: Request, outcome: Outcome) -> None:
    await asyncio.sleep(request.start_s)
    try:
        async with asyncio.timeout(request.cut_after_s):
            await _stream(http, request, outcome)
    except TimeoutError:
        outcome.cut = True
    except httpx.TransportError as error:
        outcome.error = f"connection: {error!r}"
    outcome.ended = time.monotonic()


async def _stream(http: httpx.AsyncClient, request: Request, outcome: Outcome) -> None:
    body = {"model": MODEL_NAME, "stream": True, **request.body}
    async with http.stream("POST", "/v1/completions", json=body) as reply:
        outcome.status = reply.status_code
        if reply.status_code != 200:
            outcome.error = (await reply.aread()).decode()
            return
        async for line in reply.aiter_lines():
            data = line.removeprefix("data: ")
            if not line.startswith("data: ") or data == "[DONE]":
                continue
            message = json.loads(data)
            if "error" in message:
                outcome.error = data
                return
            outcome.chunks += 1
            outcome.finished += sum(bool(c["finish_reason"]) for c in message["choices"])
            if request.cut_after_chunks is not None and outcome.chunks >= request.cut_after_chunks:
                outcome.cut = True
                return
