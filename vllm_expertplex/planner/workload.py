"""The load: prompt and output lengths, and the latency targets.

Owns: named length distributions, trace files, `Targets`. Must not know: models, layouts.
"""

import csv
import json
from datetime import datetime
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.int64]


class Targets(msgspec.Struct, frozen=True):
    """Latency targets in seconds."""

    ttft: float
    tpot: float

    def __post_init__(self) -> None:
        if self.ttft <= 0 or self.tpot <= 0:
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
    if slash and first.isdigit() and second.isdigit():
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
_TIME = ("TIMESTAMP", "timestamp", "arrived_at", "arrival")


def read_trace(path: str) -> tuple[Lengths, Lengths, NDArray[np.float64] | None]:
    """Prompt lengths, output lengths and arrival times (seconds from the first, or None).

    Reads CSV with a header and JSON lines. Numeric `timestamp` in JSON lines is milliseconds (the
    Mooncake format). Raises ValueError naming the columns it knows.
    """
    file = Path(path).expanduser()
    with file.open(newline="") as lines:
        if file.suffix == ".jsonl":
            rows = [json.loads(line) for line in lines if line.strip()]
        else:
            rows = list(csv.DictReader(lines))
    if not rows:
        raise ValueError(f"trace {path}: no requests in it")
    found = set(rows[0])
    columns = [next((c for c in names if c in found), None) for names in (_INPUT, _OUTPUT, _TIME)]
    if columns[0] is None or columns[1] is None:
        raise ValueError(
            f"trace {path}: found columns {sorted(found)}, expected one of {_INPUT} and one of "
            f"{_OUTPUT}"
        )
    inputs = np.array([max(1, int(float(r[columns[0]]))) for r in rows])
    outputs = np.array([max(1, int(float(r[columns[1]]))) for r in rows])
    if columns[2] is None:
        return inputs, outputs, None
    times = np.array([_seconds(r[columns[2]]) for r in rows])
    order = np.argsort(times, kind="stable")
    return inputs[order], outputs[order], times[order] - times.min()


def _seconds(value: str | float) -> float:
    if isinstance(value, int | float):
        return value / 1e3
    try:
        return float(value)
    except ValueError:
        whole, _, part = value.partition(".")
        return datetime.fromisoformat(whole).timestamp() + float(f"0.{part or 0}")
