"""What travels with a request inside vLLM's own parameters: its siblings, and its batch.

Owns: where that is kept. Must not know: who reads it when. No vLLM import.
"""

from typing import Any

_GROUP = "asyncep_group"
_BATCH = "asyncep_batch"


def group(name: str, size: int) -> dict[str, Any]:
    """`extra_args` that make `size` requests with this `name` run together."""
    return {_GROUP: [name, size]}


def group_of(request: Any) -> tuple[str, int] | None:
    """The group of an EngineCoreRequest: its name, and how many requests carry it."""
    found = _extras(request).get(_GROUP)
    return None if found is None else (str(found[0]), int(found[1]))


def set_batch(request: Any, batch: int, size: int) -> None:
    """Mark an EngineCoreRequest as one of `size` that are sent as `batch`."""
    value = {**_extras(request), _BATCH: [batch, size]}
    if request.sampling_params is not None:
        request.sampling_params.extra_args = value
    elif request.pooling_params is not None:
        request.pooling_params.extra_kwargs = value


def batch_of(request: Any) -> tuple[int, int] | None:
    """The batch of an EngineCoreRequest or of a scheduler's Request, and its size."""
    found = _extras(request).get(_BATCH)
    return None if found is None else (int(found[0]), int(found[1]))


def _extras(request: Any) -> dict[str, Any]:
    if request.sampling_params is not None:
        return request.sampling_params.extra_args or {}
    if request.pooling_params is not None:
        return request.pooling_params.extra_kwargs or {}
    return {}
