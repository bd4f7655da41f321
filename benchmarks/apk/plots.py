"""Draws the kept results of the persistent kernel: latency by active experts (Fig. 6), sharing one
GPU (Fig. 11/12 as a Pareto plot), grouped GEMMs against DeepGEMM (Fig. 13).
    python benchmarks/apk/plots.py benchmarks/results docs/figures
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.ticker

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_MARKS = {"APK": "o", "Green Context": "s", "MPS": "D", "stream priority": "^"}
PAPER = (1.08, 1.12)  # decode, prefill: ExpertPlex, Fig. 11/12


def rows(results: Path, name: str) -> list[dict]:
    found: list[dict] = json.loads((results / f"{name}-h200.json").read_text())["rows"]
    return found


def _ticks(axis: Any, values: Sequence[float]) -> None:
    """Plain numbers on a logarithmic axis."""
    axis.set_ticks(values, labels=[f"{v:g}" for v in values])
    axis.set_minor_locator(matplotlib.ticker.NullLocator())


def sharing(results: Path, out: Path) -> None:
    """Slowdown of decode against that of prefill, one panel per reading of the paper's shapes."""
    points: dict[tuple[str, str], dict[str, float]] = {}
    for r in rows(results, "apk_sharing"):
        reading, setting, phase = (part.strip() for part in r["name"].split(": "))
        if "exclusive" not in setting:
            points.setdefault((reading, setting), {})[phase] = r["ratio"]
    readings = sorted({reading for reading, _ in points}, reverse=True)
    figure, axes = plt.subplots(1, len(readings), figsize=(11, 4.5), squeeze=False)
    for axis, reading in zip(axes[0], readings, strict=True):
        for way, mark in _MARKS.items():
            mine = [(s, p) for (r, s), p in points.items() if r == reading and s.startswith(way)]
            x, y = ([p[phase] for _, p in mine] for phase in ("decode", "prefill"))
            axis.plot(x, y, mark, label=way)
            for setting, p in mine:
                label = setting.removeprefix(way).strip()
                at = (p["decode"], p["prefill"])
                axis.annotate(label, at, (4, 4), textcoords="offset points", fontsize=7)
        axis.plot(*PAPER, "*", color="black", label="the paper")
        axis.set(xscale="log", xlabel="decode, times its time alone", title=f"rows {reading}")
        axis.set(ylabel="prefill, times its time alone", yscale="log")
        _ticks(axis.xaxis, (1, 1.5, 2, 3, 5, 10, 20, 40))
        _ticks(axis.yaxis, (1, 1.1, 1.2, 1.5, 2, 3))
        axis.grid(alpha=0.3, which="both")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(out / "apk_sharing.png", dpi=120)


def gemms(results: Path, out: Path) -> None:
    """Time in the kernel against DeepGEMM's: contiguous as speed, masked as distance."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5))
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for r in rows(results, "apk_fig13"):
        found = re.match(r"(.+) contiguous 8 x (\d+)|(.+) masked (\d+) active x (4|16) ", r["name"])
        if found is None:
            continue
        if found[1]:
            point = (int(found[2]), r["peer"] / r["in_kernel"])
            lines.setdefault(("contiguous", found[1]), []).append(point)
        else:
            point = (int(found[4]), r["in_kernel"] - r["peer"])
            name = f"{found[3]}, {found[5]} rows"
            lines.setdefault(("masked", name), []).append(point)
    for (kind, name), points in lines.items():
        axis = left if kind == "contiguous" else right
        axis.plot(*zip(*sorted(points), strict=True), "o-", label=name)
    left.axhline(0.95, color="black", linestyle=":", label="wanted")
    left.axhline(0.88, color="grey", linestyle=":", label="the paper")
    left.set(xscale="log", xlabel="rows per expert, contiguous", ylabel="speed, DeepGEMM = 1")
    right.axhline(10, color="black", linestyle=":", label="wanted")
    right.axhline(20, color="grey", linestyle=":", label="the paper")
    right.set(xscale="log", xlabel="active experts, masked", ylabel="us behind DeepGEMM")
    _ticks(left.xaxis, (4096, 8192, 16384, 32768))
    _ticks(right.xaxis, (1, 2, 4, 8, 16, 32, 64))
    for axis in (left, right):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out / "apk_fig13.png", dpi=120)


def experts(results: Path, out: Path) -> None:
    """Latency by active experts, one line per number of rows; DeepGEMM's dotted."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), sharey=True)
    lines: dict[tuple[str, int], list[tuple[int, float, float]]] = {}
    for r in rows(results, "apk_fig06"):
        found = re.match(r"\S+ (\w+) masked (\d+) active x (\d+)", r["name"])
        assert found is not None, r["name"]
        point = (int(found[2]), r["in_kernel"], r["peer"])
        lines.setdefault((found[1], int(found[3])), []).append(point)
    for (gemm, n), points in lines.items():
        axis = axes[int(gemm == "Down")]
        active, ours, theirs = zip(*sorted(points), strict=True)
        (line,) = axis.plot(active, ours, "o-", label=f"{n} rows each")
        axis.plot(active, theirs, ":", color=line.get_color())
        axis.set(xscale="log", xlabel="active experts", title=f"M2.7 {gemm}; dotted: DeepGEMM")
        _ticks(axis.xaxis, (1, 2, 4, 8, 16, 32, 64))
        axis.grid(alpha=0.3)
    axes[0].set(ylabel="us", ylim=(0, None))
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out / "apk_fig06.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="folder with apk_*-h200.json")
    parser.add_argument("out", type=Path, help="folder for the pictures")
    args = parser.parse_args()
    for draw in (experts, sharing, gemms):
        draw(args.results, args.out)


if __name__ == "__main__":
    main()
