"""Which layouts the planner picks for the ExpertPlex paper's four deployments, and how far.

    python benchmarks/planner_layouts.py --json results.json

For each deployment one assumption at a time is moved while the others stay. The table gives the
range over which the planner still picks the paper's layout, and what it picks outside.
"""

import argparse
from typing import NamedTuple

import msgspec
from _report import Row, write
from rich.console import Console
from rich.progress import track
from rich.table import Table

from vllm_expertplex.planner.assumptions import Assumptions
from vllm_expertplex.planner.hardware import GPUS, override
from vllm_expertplex.planner.search import search
from vllm_expertplex.planner.setup import Setting, setting


class Deployment(NamedTuple):
    name: str
    model: str
    gpus: int
    lengths: tuple[int, int]
    ttft: float
    tpot: float
    layout: str


PAPER = (
    Deployment("M2.7 ShareGPT", "minimax-m2.7", 8, (400, 250), 1, 0.05, "1P3D4E"),
    Deployment("M2.7 LooGLE", "minimax-m2.7", 8, (20000, 60), 10, 0.1, "3P1D4E"),
    Deployment("GLM-5.1 ShareGPT", "glm-5.1-fp8", 24, (400, 250), 2, 0.1, "3P6D15E"),
    Deployment("GLM-5.1 LooGLE", "glm-5.1-fp8", 24, (20000, 60), 20, 0.1, "6P3D15E"),
)
SCALES = (0.25, 0.35, 0.5, 0.7, 0.85, 0.95, 1.0, 1.05, 1.15, 1.4, 2.0, 2.8, 4.0)
ASSUMPTIONS = (
    "ttft_share", "tpot_share", "routing_sigma", "hbm_saturation", "attention_floor_decode",
    "attention_floor_prefill", "moe_floor", "host_prefill", "runtime_reserve", "prefill_tokens",
    "decode_slots", "masked_tile",
)  # fmt: skip
HOST_DECODE = (0.0, 1e-3, 1.4e-3, 2e-3, 2.8e-3, 4e-3, 5.6e-3, 8e-3, 11.2e-3, 16e-3)  # seconds
UTILISATION = (0.80, 0.82, 0.84, 0.86, 0.87, 0.88, 0.885, 0.89, 0.895, 0.90, 0.92, 0.95, 1.0)
ABSOLUTE = {"host_decode": HOST_DECODE, "memory_utilisation": UTILISATION}
GPU = (
    "efficiency.gemm", "efficiency.hbm", "efficiency.attention", "nvlink_bytes_per_s",
    "rdma_bytes_per_s",
)  # fmt: skip


def pick(d: Deployment, assume: Assumptions, changes: list[str], lengths: tuple[int, int]) -> str:
    """The layout the planner picks, or '-' when nothing is feasible."""
    given: Setting = setting(
        d.model,
        override(GPUS["h800"], changes),
        f"{lengths[0]}/{lengths[1]}",
        d.ttft,
        d.tpot,
        assume,
    )
    best = search(given.problem(d.gpus), given.space(d.gpus))
    return best.layout if best else "-"


def sweep(d: Deployment, name: str) -> list[tuple[float, str]]:
    """(value, layout) over the values tried for one assumption."""
    base = Assumptions()
    if name in ABSOLUTE:
        tried = ABSOLUTE[name]
        picks = [pick(d, msgspec.structs.replace(base, **{name: v}), [], d.lengths) for v in tried]
    elif name in ("input length", "output length"):
        index = name == "output length"
        tried = tuple(float(round(d.lengths[index] * s)) for s in SCALES)
        picks = []
        for value in tried:
            lengths = (d.lengths[0], int(value)) if index else (int(value), d.lengths[1])
            picks.append(pick(d, base, [], lengths))
    elif name in GPU:
        values = msgspec.to_builtins(GPUS["h800"])
        start = values["efficiency"][name[11:]] if name.startswith("eff") else values[name]
        tried = tuple(start * s for s in SCALES if not name.startswith("eff") or start * s <= 1)
        picks = [pick(d, base, [f"{name}={v}"], d.lengths) for v in tried]
    else:
        start = getattr(base, name)
        top = 1.0 if name.endswith(("share", "saturation")) else float("inf")
        tried = tuple(min(start * s, top) for s in SCALES if start * s < 1.45 * top)
        picks = []
        for value in tried:
            cast = type(start)(value)
            picks.append(pick(d, msgspec.structs.replace(base, **{name: cast}), [], d.lengths))
    return list(zip(tried, picks, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    console, rows = Console(), []
    names = ("input length", "output length", *ABSOLUTE, *ASSUMPTIONS, *GPU)
    for d in PAPER:
        table = Table(title=f"{d.name}: {d.gpus} x H800 80 GB, paper {d.layout}")
        for column in ("assumption", "default", "holds from", "to", "of those tried", "elsewhere"):
            table.add_column(column, justify="left" if column == "elsewhere" else "right")
        for name in track(names, description=d.name, console=console, transient=True):
            picks = sweep(d, name)
            centre = _default(d, name)
            low, high = _range(picks, centre, d.layout)
            held = sum(layout == d.layout for _, layout in picks)
            others = sorted({layout for _, layout in picks if layout != d.layout})
            table.add_row(
                name, _show(centre), _show(low), _show(high), f"{held}/{len(picks)}",
                ", ".join(others),
            )  # fmt: skip
            rows.append(
                Row(f"{d.name}: {name}", "share of values", held / len(picks), None, "", None)
            )
        for label, assume in (
            ("buffers=average", Assumptions(buffers="average")),
            ("ttft_share=1 (Algorithm 1 to the letter)", Assumptions(ttft_share=1.0)),
        ):
            table.add_row(label, "", "", "", "", pick(d, assume, [], d.lengths))
        console.print(table)
    write("planner_layouts", rows, args.json)


def _default(d: Deployment, name: str) -> float:
    if name.endswith("length"):
        return float(d.lengths[name == "output length"])
    if name in GPU:
        values = msgspec.to_builtins(GPUS["h800"])
        return values["efficiency"][name[11:]] if name.startswith("eff") else values[name]
    return float(getattr(Assumptions(), name))


def _range(
    picks: list[tuple[float, str]], centre: float, layout: str
) -> tuple[float | None, float | None]:
    """Ends of the run of values around the default that give `layout`."""
    low = high = None
    for value, got in sorted(picks, reverse=True):
        if value <= centre * 1.0001:
            if got != layout:
                break
            low = value
    for value, got in sorted(picks):
        if value >= centre * 0.9999:
            if got != layout:
                break
            high = value
    return low, high


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


if __name__ == "__main__":
    main()
