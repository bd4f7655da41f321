"""Sends requests at one Poisson rate, until it is certain whether enough of them meet the targets.

Arrivals, HTTP and timing are those of vLLM's benchmark client, in this process: importing it takes
seconds, and `vllm bench serve` can only be stopped with all results lost.

A request that is not done when both targets would have let it be has missed them; it goes on, as
its load would, but counts. As soon as `search.certain`, nothing more is sent and what is under way
is cut. So a rate far beyond a system's capacity takes seconds, not minutes of draining, the verdict
is that of the whole run, and shares are of the requests that were decided by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from slo.search import Request, certain, meets
from slo.session import session
from slo.workload import Prompt

from vllm_expertplex.planner.workload import Targets

VLLM = "vllm.benchmarks.serve"  # takes seconds to import
_TICK_S = 0.05


@dataclass
class Sent:
    """A request under way. `output` is vLLM's RequestFuncOutput once it has ended."""

    at: float  # time.perf_counter()
    prompt: Prompt
    output: Any = None
    cut: bool = False  # ended because the run did
    response: aiohttp.ClientResponse | None = None
    task: asyncio.Task[None] | None = None

    def end(self) -> None:
        """Cut it, if it is under way; the output then has what came until now."""
        self.cut = self.output is None
        if self.cut and self.response:
            self.response.content.set_exception(ConnectionError("cut"))
        elif self.task:
            self.task.cancel()

    def decided(self, now: float, targets: Targets) -> Request | None:
        """Its latencies, or None while it can still meet the targets."""
        output = self.output
        if output is not None and not self.cut:
            # Several tokens may come in one event, so the gaps' sum counts, not their number.
            tokens = output.output_tokens
            tpot = sum(output.itl) / (tokens - 1) if tokens > 1 else None
            return Request(bool(output.success and tokens), output.ttft, tpot)
        if now <= self.at + targets.ttft + targets.tpot * (self.prompt.output - 1):
            return None
        return Request(True, (output and output.ttft) or math.inf, math.inf)


def verdict(sent: Sequence[Sent], now: float, count: int, targets: Targets) -> bool:
    """Whether it is certain if enough of `count` requests meet the targets."""
    decided = [d for s in sent if (d := s.decided(now, targets))]
    met = sum(all(meets(d, targets)) for d in decided)
    return certain(met, len(decided) - met, count)


class _Session:
    """What vLLM's client uses of aiohttp's: keeps the response, for `Sent.end`."""

    def __init__(self, session: aiohttp.ClientSession, sent: Sent) -> None:
        self._session, self._sent = session, sent

    @contextlib.asynccontextmanager
    async def post(self, **given: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        async with self._session.post(**given) as response:
            self._sent.response = response
            yield response


async def _run(
    base_url: str, name: str, prompts: Sequence[Prompt], rate: float, targets: Targets
) -> tuple[list[Sent], float]:
    """What was sent, and the moment at which it was decided."""
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.benchmarks.lib.endpoint_request_func import ASYNC_REQUEST_FUNCS, RequestFuncInput
    from vllm.benchmarks.serve import get_request

    sent: list[Sent] = []
    decided = False

    async def one(mine: Sent) -> None:
        given = RequestFuncInput(
            prompt=mine.prompt.text,
            api_url=f"{base_url}/v1/completions",
            prompt_len=mine.prompt.tokens,
            output_len=mine.prompt.output,
            model=name,
            ignore_eos=True,
            extra_body={"temperature": 1.0},
        )
        mine.output = await ASYNC_REQUEST_FUNCS["openai"](given, _Session(http, mine))

    async def send() -> None:
        np.random.seed(0)  # every system gets the same arrivals
        requests = [SampleRequest(p, p.tokens, p.output) for p in prompts]  # type: ignore[arg-type]
        async for request, _ in get_request(requests, rate):
            if decided:
                return
            sent.append(mine := Sent(time.perf_counter(), request.prompt))  # type: ignore[arg-type]
            mine.task = asyncio.create_task(one(mine))
        await asyncio.gather(*(s.task for s in sent if s.task), return_exceptions=True)

    async with session() as http:
        sending = asyncio.create_task(send())
        while not sending.done():
            await asyncio.wait({sending}, timeout=_TICK_S)
            if verdict(sent, time.perf_counter(), len(prompts), targets):
                break
        if sending.done():
            sending.result()  # raises its error, if any
        decided, now = True, time.perf_counter()
        for request in sent:
            request.end()
        tasks = [s.task for s in sent if s.task]
        await asyncio.wait(tasks, timeout=10)
        sending.cancel()
    for task in tasks:
        if task.done() and not task.cancelled():
            task.result()  # raises its error, if any
    return sent, now


def run(
    base_url: str,
    name: str,
    prompts: Sequence[Prompt],
    rate: float,
    targets: Targets,
    result: Path | None = None,
) -> list[Request]:
    """Latencies of the requests that were decided when the run was; all that were sent go to
    `result`, with the names of `vllm bench serve --save-detailed`.
    """
    sent, now = asyncio.run(_run(base_url, name, prompts, rate, targets))
    if result:
        result.write_text(json.dumps(detailed(sent, rate)))
    return [d for s in sent if (d := s.decided(now, targets))]


def detailed(sent: Sequence[Sent], rate: float) -> dict[str, Any]:
    """Fields as in vLLM's result file. A request that was cut has an error that says so."""
    outputs = [s.output for s in sent]
    return {
        "request_rate": rate,
        "num_prompts": len(sent),
        "completed": sum(bool(o and o.success) for o in outputs),
        "input_lens": [s.prompt.tokens for s in sent],
        "output_lens": [o.output_tokens if o else 0 for o in outputs],
        "start_times": [s.at for s in sent],
        "ttfts": [o.ttft if o else 0.0 for o in outputs],
        "itls": [o.itl if o else [] for o in outputs],
        "errors": [
            "cut: the run was decided" if s.cut else s.output.error.strip()[-200:] for s in sent
        ],
    }
