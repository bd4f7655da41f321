"""A front for vLLM's own prefill-decode disaggregation: one prefill engine, one decode engine.

    python -m slo.pdd_proxy PORT PREFILL_URL DECODE_URL

A request goes to prefill for one token, then, with the KV transfer's parameters that came back, to
decode, whose stream is passed on. A client that goes away cancels what was begun for it.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp import web
from slo.session import session

_HTTP = web.AppKey("http", aiohttp.ClientSession)
_PREFILL_ONLY = {"do_remote_decode": True, "do_remote_prefill": False}


def application(prefill_url: str, decode_url: str) -> web.Application:
    async def complete(request: web.Request) -> web.StreamResponse:
        http: aiohttp.ClientSession = request.app[_HTTP]
        body = await request.json()
        first: dict[str, Any] = body | {
            "max_tokens": 1,
            "stream": False,
            "kv_transfer_params": _PREFILL_ONLY,
        }
        first.pop("stream_options", None)
        async with http.post(prefill_url + request.path, json=first) as answer:
            if not answer.ok:
                return web.Response(body=await answer.read(), status=answer.status)
            body["kv_transfer_params"] = (await answer.json())["kv_transfer_params"]
        async with http.post(decode_url + request.path, json=body) as answer:
            response = web.StreamResponse(status=answer.status)
            response.content_type = answer.content_type
            await response.prepare(request)
            async for part in answer.content.iter_any():
                await response.write(part)
            await response.write_eof()
            return response

    async def everywhere(request: web.Request) -> web.Response:
        http = request.app[_HTTP]
        for url in (prefill_url, decode_url):
            async with http.request(request.method, url + request.path) as answer:
                if not answer.ok:
                    return web.Response(status=503, text=f"{url} answered {answer.status}")
        return web.Response()

    async def connected(app: web.Application) -> AsyncIterator[None]:
        async with session() as app[_HTTP]:
            yield

    app = web.Application(client_max_size=2**30)
    app.cleanup_ctx.append(connected)
    app.router.add_post("/v1/completions", complete)
    app.router.add_get("/health", everywhere)
    app.router.add_post("/start_profile", everywhere)
    app.router.add_post("/stop_profile", everywhere)
    return app


if __name__ == "__main__":
    port, prefill_url, decode_url = sys.argv[1:]
    web.run_app(
        application(prefill_url, decode_url),
        host="127.0.0.1",
        port=int(port),
        print=None,
        access_log=None,
        handler_cancellation=True,
    )
