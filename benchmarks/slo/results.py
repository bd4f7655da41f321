"""What was measured, one JSON object a line, and what is made of it: table, rows, figures.

A line is written for each rate as soon as it is known, so a run that is killed loses nothing, and
runs that share a machine and a model are merged by reading their files together.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import model_speed
import msgspec
import step_profile
from _report import Row
from _report import write as report
from rich.console import Console
from rich.table import Table
from slo.search import SHARE, Attainment, Found, Probe


class Load(msgspec.Struct, tag="load"):
    """One system under one workload, at some rates. Seconds, requests per second."""

    system: str
    ours: bool
    device: str
    workload: str
    ttft: float
    tpot: float
    kv_tokens: int
    start_s: float
    probes: list[Probe]

    @property
    def asked(self) -> str:
        """The workload with its targets: only loads of which both are the same compare."""
        return f"{self.workload}, {self.ttft:g} s, {1e3 * self.tpot:g} ms"

    @property
    def fails(self) -> float:
        return Found(self.probes).fails

    @property
    def goodput(self) -> float:
        return Found(self.probes).goodput


class Speed(msgspec.Struct, tag="speed"):
    """One system with nothing else to do; `figures` are those of `model_speed.measure`."""

    system: str
    ours: bool
    device: str
    layers: int
    figures: dict[str, float]
    step: step_profile.Breakdown | None


Record = Load | Speed


def append(path: Path, record: Record) -> None:
    with path.open("ab") as file:
        file.write(msgspec.json.encode(record) + b"\n")


def read(paths: Iterable[Path]) -> list[Record]:
    """All rates of each system, workload and targets as one, and its last speed; in order of
    appearance.
    """
    found: dict[tuple[str, str], Record] = {}
    for path in paths:
        for line in path.read_bytes().splitlines():
            record = msgspec.json.decode(line, type=Record)  # type: ignore[arg-type]
            key = record.system, record.asked if isinstance(record, Load) else ""
            before = found.get(key)
            if isinstance(record, Load) and isinstance(before, Load):
                record.probes = _joined([*before.probes, *record.probes])
            found[key] = record
    return list(found.values())


def _joined(probes: Iterable[Probe]) -> list[Probe]:
    """By rate; those of the same rate are one, of the requests of all."""
    found: dict[float, Probe] = {}
    for probe in probes:
        if before := found.get(probe.rate):
            count = before.requests + probe.requests
            shares = zip(before.attainment, probe.attainment, strict=True)
            met = ((a * before.requests + b * probe.requests) / count for a, b in shares)
            probe = Probe(probe.rate, Attainment(*met), count)
        found[probe.rate] = probe
    return sorted(found.values())


def _by_load(records: Sequence[Record]) -> dict[str, list[Load]]:
    found: dict[str, list[Load]] = {}
    for record in records:
        if isinstance(record, Load):
            found.setdefault(record.asked, []).append(record)
    return found


def _best(loads: Iterable[Load], ours: bool) -> Load | None:
    """The one of the highest goodput; None where that is 0."""
    found = (x for x in loads if x.ours == ours and x.goodput > 0)
    return max(found, key=lambda x: x.goodput, default=None)


# How a ratio of goodputs may be wrong, by whether either has failed at no rate: then more is true.
_BOUNDS = {(False, False): "", (True, False): "≥", (False, True): "≤", (True, True): "?"}
_WORDS = {"": "", "≥": ", at least", "≤": ", at most", "?": ", neither failed"}


def _bound(x: Load, peer: Load) -> str:
    return "" if x is peer else _BOUNDS[x.fails == math.inf, peer.fails == math.inf]


def show(records: Sequence[Record], console: Console) -> None:
    """Goodput of every system, and its ratio to the best of vLLM's own."""
    table = Table(title=f"P90 goodput, requests per second ({SHARE:.0%} of all within targets)")
    for column in (
        "workload",
        "system",
        "goodput",
        "fails at",
        "/ best vLLM",
        "KV tokens",
        "rates",
    ):
        table.add_column(column, overflow="fold")  # names of systems have no spaces
    for asked, loads in _by_load(records).items():
        plain = _best(loads, ours=False)
        for x in loads:
            ratio = f"{_bound(x, plain)}{x.goodput / plain.goodput:.2f}" if plain else ""
            tried = ", ".join(f"{p.rate:.3g} ({p.attainment.both:.0%})" for p in x.probes)
            fails = "" if x.fails == math.inf else f"{x.fails:.3g}"
            table.add_row(
                asked, x.system, f"{x.goodput:.3g}", fails, ratio, str(x.kv_tokens), tried
            )
        table.add_section()
    console.print(table)


def rows(records: Sequence[Record]) -> list[Row]:
    """Goodput: our best beside each of vLLM's modes, our others beside the best of those; then what
    it was found from, and speeds.
    """
    table = []
    for asked, loads in _by_load(records).items():
        ours, plain = _best(loads, ours=True), _best(loads, ours=False)
        for x in loads:
            mine, peer = (x, plain) if x.ours else (ours, x)
            if x is ours or not mine or not peer:
                continue
            name = f"{asked}: goodput, {mine.system}{_WORDS[_bound(mine, peer)]}"
            table.append(Row(name, "req/s", mine.goodput, peer.goodput, peer.system, None))
        for x in loads:
            table.append(Row(f"{asked}: goodput, {x.system}", "req/s", x.goodput, None, "", None))
            table.append(Row(f"{asked}: KV, {x.system}", "tokens", x.kv_tokens, None, "", None))
            for p in x.probes:
                for field in Attainment._fields:
                    label = f"{asked}: {x.system}, {field} at {p.rate:.4g}/s"
                    table.append(Row(label, "share", getattr(p.attainment, field), None, "", None))
    return table + _speed_rows([r for r in records if isinstance(r, Speed)])


def _speed_rows(speeds: Sequence[Speed]) -> list[Row]:
    plain = [(s.figures, s.system) for s in speeds if not s.ours]
    table = []
    for s in speeds:
        for peer in (plain if s.ours else []) or [({}, "")]:
            given = model_speed.rows(s.layers, s.figures, *peer)
            table += [r | {"name": f"{s.system}: {r['name']}"} for r in given]
        table += step_profile.rows(s.system, s.step) if s.step else []
    return [Row(**row) for row in table]


def write(records: Sequence[Record], path: Path) -> None:
    """The rows, with the device they were measured on."""
    devices = ", ".join(dict.fromkeys(record.device for record in records))
    report("goodput", rows(records), path, devices)


def plot(records: Sequence[Record], folder: Path) -> None:
    """Attainment of TTFT, TPOT and both over the rate, a figure for each workload: the paper's
    Fig. 7 to 10.
    """
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    for asked, loads in _by_load(records).items():
        figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), sharey=True)
        for axis, field in zip(axes, Attainment._fields, strict=True):
            for x in loads:
                rates = [p.rate for p in x.probes]
                shares = [getattr(p.attainment, field) for p in x.probes]
                style = "o-" if x.ours else "s--"
                axis.plot(rates, shares, style, label=x.system, markersize=4)
            axis.axhline(SHARE, color="grey", linewidth=0.5)
            axis.set(title=field, xlabel="requests per second", ylim=(0, 1.05))
        axes[0].set_ylabel("share of requests")
        load = loads[0]
        figure.suptitle(f"{load.workload}: TTFT {load.ttft:g} s, TPOT {1e3 * load.tpot:g} ms")
        figure.tight_layout()
        lines = axes[-1].get_legend_handles_labels()  # whose names are longer than an axis
        figure.legend(*lines, ncols=2, loc="upper center", bbox_to_anchor=(0.5, 0))
        name = f"goodput_{re.sub('[^a-z0-9-]+', '-', asked.lower())}.png"
        figure.savefig(folder / name, bbox_inches="tight")
        plt.close(figure)
