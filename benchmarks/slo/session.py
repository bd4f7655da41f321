"""HTTP sessions with vLLM's servers."""

from __future__ import annotations

import aiohttp

# vLLM's servers close idle connections after 5 s: do not use one as they do.
KEEP_ALIVE_S = 2


def session() -> aiohttp.ClientSession:
    """Of any number of connections, whose requests take as long as they take."""
    limits = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
    return aiohttp.ClientSession(connector=limits, timeout=aiohttp.ClientTimeout(total=None))
