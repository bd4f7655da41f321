"""Serving modes, one per file; `build` makes one by name.

Owns: the names. Must not know: metrics.
"""

from collections.abc import Callable

from vllm_expertplex.planner.setup import Setting
from vllm_expertplex.simulator.requests import Requests
from vllm_expertplex.simulator.steps import Knobs
from vllm_expertplex.simulator.systems.asyncep import AsyncEP
from vllm_expertplex.simulator.systems.base import System
from vllm_expertplex.simulator.systems.colocated import Chunked, Colocated
from vllm_expertplex.simulator.systems.expertplex import ExpertPlex
from vllm_expertplex.simulator.systems.green_context import GreenContext
from vllm_expertplex.simulator.systems.pdd import Disaggregated

SYSTEMS: dict[str, Callable[..., System]] = {
    "expertplex": ExpertPlex,
    "pdd": Disaggregated,
    "green-context": GreenContext,
    "colocated": Colocated,
    "chunked": Chunked,
    "asyncep": AsyncEP,
}


def build(
    name: str, setting: Setting, gpus: int, requests: Requests, knobs: Knobs, **options: object
) -> System:
    """A fresh system. Raises ValueError when it cannot serve this load at all."""
    if name not in SYSTEMS:
        raise ValueError(f"serving mode {name!r}: expected one of {', '.join(SYSTEMS)}")
    return SYSTEMS[name](setting, gpus, requests, knobs, **options)
