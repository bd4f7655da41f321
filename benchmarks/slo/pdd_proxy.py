"""A front for vLLM's own prefill-decode disaggregation: one prefill engine, one decode engine.

    python pdd_proxy.py PORT PREFILL_URL DECODE_URL

A request goes to prefill for one token, then, with the KV transfer's parameters that came back, to
decode, whose stream is passed on.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

_PREFILL_ONLY = {"do_remote_decode": True, "do_remote_prefill": False}


def application(prefill_url: str, decode_url: str) -> Starlette:
    limits = httpx.Limits(max_connections=None)
    prefill, decode = (
        httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False)
        for url in (prefill_url, decode_url)
    )

    async def complete(request: Request) -> Response:
        path, body = request.url.path, await request.json()
        first: dict[str, Any] = body | {
            "max_tokens": 1,
            "stream": False,
            "kv_transfer_params": _PREFILL_ONLY,
        }
        first.pop("stream_options", None)
        answer = await prefill.post(path, json=first)
        if not answer.is_success:
            return Response(answer.content, answer.status_code)
        body["kv_transfer_params"] = answer.json()["kv_transfer_params"]

        async def stream() -> AsyncIterator[bytes]:
            async with decode.stream("POST", path, json=body) as response:
                async for part in response.aiter_raw():
                    yield part

        return StreamingResponse(stream(), media_type="text/event-stream")

    async def health(_: Request) -> Response:
        for client in (prefill, decode):
            if not (await client.get("/health")).is_success:
                return Response(status_code=503)
        return Response()

    return Starlette(
        routes=[
            Route("/v1/completions", complete, methods=["POST"]),
            Route("/health", health),
        ]
    )


if __name__ == "__main__":
    port, prefill_url, decode_url = sys.argv[1:]
    uvicorn.run(application(prefill_url, decode_url), port=int(port), log_level="warning")
