"""Numbers that a user changes by name, and what they may be.

Owns: reading NAME=VALUE, and the bounds that several descriptions share. Must not know: what the
numbers mean.
"""

from typing import Annotated, Any, TypeVar

import msgspec

S = TypeVar("S", bound=msgspec.Struct)

Share = Annotated[float, msgspec.Meta(ge=1e-4, le=1)]
Rate = Annotated[float, msgspec.Meta(ge=1e-3, le=1e24)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e24)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


def parse(option: str, change: str, kind: type) -> Any:
    """The value of `NAME=VALUE` as `kind`. Raises ValueError when it is none."""
    name, _, text = change.partition("=")
    if kind is str:
        return text
    try:
        value = float(text)
        if kind is float:
            return value
        if value.is_integer():
            return int(value)
    except ValueError:
        pass
    number = "number" if kind is float else "whole number"
    raise ValueError(f"{option} {name}={text}: expected {name}=VALUE with a {number}")


def checked(option: str, change: str, values: dict[str, Any], kind: type[S]) -> S:
    """`values` as a `kind`. Raises ValueError when the change that made them breaks a bound."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        wrong = str(error).split(" - at ")[0].replace("`", "")
        expected = wrong[0].lower() + wrong[1:]
        raise ValueError(f"{option} {change}: {expected}") from None
