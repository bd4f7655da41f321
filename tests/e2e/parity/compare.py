"""Compares two responses to one request: everything but identifiers and times."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

_VOLATILE = {"id", "created", "system_fingerprint"}


class Difference(NamedTuple):
    """Where two responses differ, as a path, and what each says there."""

    path: str
    plain: Any
    ours: Any

    @property
    def numeric(self) -> bool:
        """Whether it is only a logprob's value."""
        return isinstance(self.plain, float) and isinstance(self.ours, float)

    def __str__(self) -> str:
        return f"{self.path}: plain {str(self.plain)[:60]!r}, ours {str(self.ours)[:60]!r}"


class Comparison(NamedTuple):
    """All differences beyond the tolerance, and the largest one between any two floats."""

    differences: list[Difference]
    max_float_difference: float


def compare(plain: Any, ours: Any, tolerance: float) -> Comparison:
    """Compare two decoded JSON responses. All their floats are logprobs; `tolerance` is in nats.

    Where a tolerance is allowed, a token's rank may move by a hundredth: among thousands of tokens
    some are nearer to each other than any tolerance.
    """
    found: list[Difference] = []
    largest = 0.0
    for difference in _walk(plain, ours, ""):
        if difference.numeric:
            distance = abs(difference.plain - difference.ours)
            largest = max(largest, distance)
            if distance <= tolerance:
                continue
        elif tolerance and _near_rank(difference):
            continue
        found.append(difference)
    return Comparison(found, largest)


def _near_rank(difference: Difference) -> bool:
    _, plain, ours = difference
    ranks = difference.path.endswith("/rank") and isinstance(plain, int) and isinstance(ours, int)
    return ranks and abs(plain - ours) <= 1 + plain // 100


def _walk(plain: Any, ours: Any, path: str) -> Iterator[Difference]:
    """Every leaf that is not equal."""
    if isinstance(plain, dict) and isinstance(ours, dict):
        for key in (plain.keys() | ours.keys()) - _VOLATILE:
            yield from _walk(plain.get(key), ours.get(key), f"{path}/{key}")
    elif isinstance(plain, list) and isinstance(ours, list):
        if len(plain) != len(ours):
            yield Difference(f"{path}/length", len(plain), len(ours))
        for index, (a, b) in enumerate(zip(plain, ours, strict=False)):
            yield from _walk(a, b, f"{path}/{index}")
    elif not _equal(plain, ours):
        yield Difference(path, plain, ours)


def _equal(plain: Any, ours: Any) -> bool:
    if isinstance(plain, float) and isinstance(ours, float):
        return plain == ours or (math.isnan(plain) and math.isnan(ours))
    return type(plain) is type(ours) and bool(plain == ours)


def merge_stream(events: list[dict[str, Any]]) -> dict[str, Any]:
    """One response out of a stream's events: where text is cut into events depends on time only.

    Strings and lists of a choice are joined in order; of anything else the last value counts.
    """
    merged: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event.get("choices") or []:
            _join(choices.setdefault(choice["index"], {}), choice)
        merged |= {key: value for key, value in event.items() if key != "choices" and value}
    return merged | {"choices": [choices[index] for index in sorted(choices)]}


_JOINED = {
    "text",
    "content",
    "token_ids",
    "tokens",
    "token_logprobs",
    "text_offset",
    "top_logprobs",
}


def _join(whole: dict[str, Any], part: dict[str, Any]) -> None:
    for key, value in part.items():
        old = whole.get(key)
        if isinstance(value, dict):
            whole[key] = {} if old is None else old
            _join(whole[key], value)
        elif value is None:
            whole.setdefault(key, None)
        else:
            whole[key] = old + value if key in _JOINED and old is not None else value
