"""What the tile scheduler costs per tile, in ns: one worker, and two that claim the same tickets.

    python benchmarks/scheduler_cost.py [--json FILE]

Compiles csrc/tests/cost.cpp, which claims and finishes tiles with nothing in between. The peer is
the 100 us that a tile of the CPU backend takes.
"""

import argparse
import subprocess
from pathlib import Path

from _report import Row, write
from rich.console import Console
from rich.table import Table

CSRC = Path(__file__).resolve().parent.parent / "csrc"
TILE_NS = 100_000.0
FLOOR = 0.01  # at most this share of a tile


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    subprocess.run(["make", "-s", "-C", CSRC, "build/cost"], check=True)
    output = subprocess.run([CSRC / "build" / "cost"], check=True, capture_output=True, text=True)
    rows = []
    for line in output.stdout.splitlines():
        workers, sources, clock, ns = line.split()
        name = f"{workers} worker(s), {sources} source(s)" + (", reading the time" * int(clock))
        rows.append(Row(name, "ns per tile", float(ns), TILE_NS, "a 100 us tile", FLOOR))
    table = Table("", "ns per tile", "share of a tile", "at most", title="Scheduler cost")
    for row in rows:
        assert row.ratio is not None
        table.add_row(row.name, f"{row.ours:.1f}", f"{row.ratio:.3%}", f"{FLOOR:.0%}")
    Console().print(table)
    write("scheduler_cost", rows, args.json)


if __name__ == "__main__":
    main()
