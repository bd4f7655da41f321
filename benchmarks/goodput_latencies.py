"""Latencies of the requests that benchmarks/goodput.py kept: what its shares are made of.

    python benchmarks/goodput_latencies.py OUT [OUT ...] [--json FILE]

For each system, workload and rate: time to the first token, from it to the second (in a system that
hands KV over, the handoff), between later ones as they reach the client, and TPOT. A rate that was
left early has only the requests that had ended by then.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from _report import Row, write
from rich.console import Console
from rich.table import Table
from slo.results import Load, read


class Latencies(NamedTuple):
    """Milliseconds: P50 and another percentile of each; `between` P99, the others P90."""

    requests: int
    first: tuple[float, float]
    second: tuple[float, float]
    between: tuple[float, float]
    tpot: tuple[float, float]


def percentiles(values: Sequence[float], high: int) -> tuple[float, float]:
    """P50 and P`high` of seconds, in milliseconds."""
    low, upper = np.percentile(values, (50, high)) * 1e3
    return float(low), float(upper)


def latencies(file: Path) -> Latencies | None:
    """Of one file of requests; None where too little ended to tell, or it is another file."""
    kept = json.loads(file.read_bytes())
    if "itls" not in kept:
        return None
    columns = zip(*(kept[k] for k in ("ttfts", "itls", "output_lens", "errors")), strict=True)
    ended = [(t, gaps, n) for t, gaps, n, error in columns if not error and len(gaps) > 1]
    if len(ended) < 2:
        return None
    return Latencies(
        len(ended),
        percentiles([t for t, _, _ in ended], 90),
        percentiles([gaps[0] for _, gaps, _ in ended], 90),
        percentiles([gap for _, gaps, _ in ended for gap in gaps[1:]], 99),
        percentiles([sum(gaps) / (n - 1) for _, gaps, n in ended], 90),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", metavar="OUT", nargs="+", type=Path, help="goodput.py --out")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    table = Table(title="milliseconds: P50 / P90, between tokens P50 / P99")
    for column in ("system, workload, requests/s", "ended", *Latencies._fields[1:]):
        table.add_column(column)
    rows = []
    for file in sorted(f for folder in options.folders for f in folder.glob("*.json")):
        if (found := latencies(file)) is None:
            continue
        figures = (f"{low:.0f} / {high:.0f}" for low, high in found[1:])
        table.add_row(file.stem, str(found.requests), *figures)
        for name, (_, high) in zip(found._fields[1:], found[1:], strict=True):
            percentile = "P99" if name == "between" else "P90"
            row = f"{file.stem}: {name}, {percentile} of {found.requests} requests"
            rows.append(Row(row, "ms", high, None, "", None))
    Console(width=160).print(table)
    loads = [r for r in read(f / "measured.jsonl" for f in options.folders) if isinstance(r, Load)]
    write("goodput_latencies", rows, options.json, loads[0].device if loads else None)


if __name__ == "__main__":
    main()
