"""The load: prompt and output lengths, and the latency targets.

Owns: named length distributions, trace files, `Targets`. Must not know: models, layouts.
"""

import csv
import io
import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from vllm_expertplex.planner.files import read

Lengths = NDArray[np.int64]


class Targets(msgspec.Struct, frozen=True):
    """Latency targets in seconds."""

    ttft: float
    tpot: float

    def __post_init__(self) -> None:
        if not (0 < self.ttft < math.inf and 0 < self.tpot < math.inf):
            raise ValueError(
                f"targets must be positive seconds, found ttft={self.ttft}, tpot={self.tpot}"
            )


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Lengths: two quantile tables (equal steps from 0 to 1), or log-normal around two means.

    `sample` draws prompt and output independently: the marginals hold, their relation does not.
    """

    name: str
    mean_input: float
    mean_output: float
    input_quantiles: tuple[float, ...] = ()
    output_quantiles: tuple[float, ...] = ()
    sigma: float = 0.6
    source: str = ""

    def __post_init__(self) -> None:
        if self.mean_input < 1 or self.mean_output < 1:
            raise ValueError(
                f"workload {self.name}: mean lengths must be at least one token, found "
                f"{self.mean_input}/{self.mean_output}"
            )

    def sample(self, count: int, rng: np.random.Generator) -> tuple[Lengths, Lengths]:
        """`count` prompt and output lengths in tokens, each at least one."""
        return (
            self._draw(self.mean_input, self.input_quantiles, count, rng),
            self._draw(self.mean_output, self.output_quantiles, count, rng),
        )

    def _draw(
        self, mean: float, quantiles: tuple[float, ...], count: int, rng: np.random.Generator
    ) -> Lengths:
        if quantiles:
            grid = np.linspace(0, 1, len(quantiles))
            value = np.interp(rng.random(count), grid, np.asarray(quantiles))
        elif mean <= 1:
            value = np.ones(count)
        else:
            value = rng.lognormal(np.log(mean) - self.sigma**2 / 2, self.sigma, count)
        return np.maximum(1, np.rint(value)).astype(np.int64)


def from_quantiles(name: str, inputs: list[float], outputs: list[float], source: str) -> Workload:
    """A workload from two quantile tables."""

    def mean(q: list[float]) -> float:
        middle = (np.asarray(q[1:]) + np.asarray(q[:-1])) / 2
        return float(middle.mean())

    return Workload(
        name=name,
        mean_input=mean(inputs),
        mean_output=mean(outputs),
        input_quantiles=tuple(inputs),
        output_quantiles=tuple(outputs),
        source=source,
    )


def _named() -> dict[str, Workload]:
    from vllm_expertplex.planner.workload_tables import TABLES

    chat = "assumed: the papers give no length statistics; log-normal, sigma 0.6"
    fixed = {
        "sharegpt": Workload(name="sharegpt", mean_input=400, mean_output=250, source=chat),
        "long-input": Workload(
            name="long-input", mean_input=20000, mean_output=60, sigma=0.3,
            source="assumed: LooGLE-like, about 20K tokens in and tens out; log-normal, sigma 0.3",
        ),
        "classify": Workload(
            name="classify", mean_input=1000, mean_output=1,
            source="assumed: prefill-only requests of 1000 tokens",
        ),
    }  # fmt: skip
    return fixed | {n: from_quantiles(n, i, o, s) for n, (i, o, s) in TABLES.items()}


def load_workload(text: str) -> Workload:
    """A named workload, `INPUT/OUTPUT` mean tokens, or a trace file (.csv or .jsonl).

    Raises ValueError with what is possible.
    """
    named = _named()
    if text in named:
        return named[text]
    if Path(text).expanduser().is_file():
        inputs, outputs, _ = read_trace(text)
        grid = np.linspace(0, 1, 101)
        return from_quantiles(
            Path(text).stem,
            np.quantile(inputs, grid).tolist(),
            np.quantile(outputs, grid).tolist(),
            source=f"trace {text}, {len(inputs)} requests",
        )
    first, slash, second = text.partition("/")
    if slash and first.isdecimal() and second.isdecimal():
        return Workload(
            name=text, mean_input=int(first), mean_output=int(second),
            source="given; log-normal, sigma 0.6",
        )  # fmt: skip
    raise ValueError(
        f"workload {text!r}: expected INPUT/OUTPUT mean tokens such as 1000/200, a trace file "
        f"(.csv or .jsonl), or one of {', '.join(named)}"
    )


_INPUT = ("num_prefill_tokens", "ContextTokens", "input_length", "input_tokens", "prompt_tokens")
_OUTPUT = (
    "num_decode_tokens", "GeneratedTokens", "output_length", "output_tokens", "completion_tokens",
)  # fmt: skip
MOST_TOKENS = 10**9  # of one request, in or out
MOST_SECONDS = 1e11  # beyond any date: milliseconds given as seconds are
_TIME = ("TIMESTAMP", "timestamp", "arrived_at", "arrival")


def read_trace(path: str) -> tuple[Lengths, Lengths, NDArray[np.float64] | None]:
    """Prompt lengths, output lengths and arrival times (seconds from the first, or None).

    Reads CSV with a header and JSON lines. Numeric `timestamp` in JSON lines is milliseconds (the
    Mooncake format); a date without a zone is UTC. Raises ValueError naming the columns it knows,
    or the row that is wrong.
    """
    text = read("trace", path)
    rows = _json_lines(text, path) if Path(path).suffix == ".jsonl" else _csv(text, path)
    if not rows:
        raise ValueError(f"trace {path}: no requests in it")
    found = rows[0].keys() if isinstance(rows[0], dict) else []
    columns = [next((c for c in names if c in found), None) for names in (_INPUT, _OUTPUT, _TIME)]
    if columns[0] is None or columns[1] is None:
        raise ValueError(
            f"trace {path}: found columns {list(found)}, expected one of {_INPUT} and one of "
            f"{_OUTPUT}"
        )
    values = []
    for number, row in enumerate(rows, start=1):
        try:
            lengths = [_tokens(row[column]) for column in columns[:2]]
            values.append((*lengths, _seconds(row[columns[2]]) if columns[2] else 0.0))
        except (ValueError, TypeError, KeyError, OverflowError):
            raise ValueError(
                f"trace {path}, row {number}: found {str(row)[:120]}, expected tokens from 0 to "
                f"{MOST_TOKENS} in {columns[0]} and {columns[1]}"
                + (f", a date or seconds (JSON lines: ms) in {columns[2]}" if columns[2] else "")
            ) from None
    inputs, outputs, times = (np.array(column) for column in zip(*values, strict=True))
    if columns[2] is None:
        return inputs, outputs, None
    order = np.argsort(times, kind="stable")
    return inputs[order], outputs[order], times[order] - times.min()


def _csv(text: str, path: str) -> list[Any]:
    try:
        return list(csv.DictReader(io.StringIO(text)))
    except csv.Error as error:
        raise ValueError(f"trace {path}: {error}; expected CSV with a header") from None


def _json_lines(text: str, path: str) -> list[Any]:
    rows = []
    for number, line in enumerate(filter(str.strip, text.splitlines()), start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(
                f"trace {path}, row {number}: {error.msg}; expected one JSON object a line"
            ) from None
    return rows


def _tokens(value: str | float) -> int:
    """A length of at least one token; what has none recorded still takes one."""
    count = float(value)
    if not 0 <= count <= MOST_TOKENS:
        raise ValueError
    return max(1, int(count))


def _seconds(value: str | float) -> float:
    if isinstance(value, int | float):
        seconds = value / 1e3
    else:
        try:
            seconds = float(value)
        except ValueError:
            date = datetime.fromisoformat(value)
            seconds = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    if not abs(seconds) < MOST_SECONDS:
        raise ValueError
    return seconds
