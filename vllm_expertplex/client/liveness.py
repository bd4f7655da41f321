"""Noticing an attention server that lives but makes no progress.

Owns: when silence counts as death. Must not know: requests, processes.
"""

import asyncio
from collections.abc import Callable
from typing import Any


async def silence(engine: Any, progress: Callable[[], int], patience_s: float) -> None:
    """Return once `engine` has neither answered nor made progress for `patience_s`.

    An engine answers between two steps, and a step can be long; `progress` grows within one.
    Raises what the engine's client raises, EngineDeadError for example.
    """
    while True:
        probe = asyncio.ensure_future(engine.call_utility_async("is_scheduler_paused"))
        seen = progress()
        while not (await asyncio.wait({probe}, timeout=patience_s))[0]:
            if progress() == seen:
                probe.cancel()
                return
            seen = progress()
        probe.result()
        await asyncio.sleep(patience_s / 4)
