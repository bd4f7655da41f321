"""How long the planner searches, and whether the fast search finds the exhaustive optimum.

    python benchmarks/planner_search.py --json results.json --plot docs/figures/planner_search.png

Any split of the GPUs (`free` placement), GLM-5.1-FP8 on H800 from 24 GPUs on, MiniMax-M2.7 at 8.
The peer of a search is Algorithm 1 as written, where that is run; the floor is the time allowed.
"""

import argparse
import time

from _report import Row, write
from rich.console import Console
from rich.table import Table

from vllm_expertplex.planner.search import search, search_exhaustive
from vllm_expertplex.planner.setup import setting

ALLOWED = {8: 0.2, 24: 1.0, 64: 5.0, 128: 10.0, 512: 30.0, 1024: 60.0, 4096: 300.0}
EXHAUSTIVE = (8, 24, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", default=",".join(map(str, ALLOWED)), help="comma-separated")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE")
    args = parser.parse_args()
    table = Table(title="Search time (s), free placement")
    for name in ("GPUs", "model", "layout", "req/s", "search", "allowed", "Algorithm 1", "same"):
        table.add_column(name, justify="right", overflow="fold")
    rows: list[Row] = []
    for gpus in (int(n) for n in args.gpus.split(",")):
        name = "minimax-m2.7" if gpus < 24 else "glm-5.1-fp8"
        given = setting(name, "h800", "sharegpt", 2.0 if gpus >= 24 else 1.0, 0.1)
        problem, space = given.problem(gpus), given.space(gpus, "free")
        begin = time.perf_counter()
        best = search(problem, space)
        seconds = time.perf_counter() - begin
        assert best is not None
        peer, same = None, ""
        if gpus in EXHAUSTIVE:
            problem = given._replace().problem(gpus)
            begin = time.perf_counter()
            exact = search_exhaustive(problem, space)
            peer = time.perf_counter() - begin
            assert exact is not None
            same = "yes" if abs(exact.goodput / best.goodput - 1) < 1e-9 else "NO"
        allowed = ALLOWED.get(gpus, 300.0)
        table.add_row(
            str(gpus), name, best.layout, f"{best.goodput:.4g}", f"{seconds:.3f}", f"{allowed:g}",
            f"{peer:.2f}" if peer else "-", same,
        )  # fmt: skip
        rows.append(Row(f"{gpus} GPUs", "s", seconds, peer, "Algorithm 1 as written", allowed))
    Console().print(table)
    if args.plot:
        draw(rows, args.plot)
    write("planner_search", rows, args.json)


def draw(rows: list[Row], path: str) -> None:
    """Growth of search time with the number of GPUs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5.2, 3.4))
    gpus = [int(row.name.split()[0]) for row in rows]
    axes.loglog(gpus, [row.ours for row in rows], marker="o", label="separable search")
    exact = [(n, row.peer) for n, row in zip(gpus, rows, strict=True) if row.peer]
    axes.loglog(*zip(*exact, strict=True), marker="s", label="Algorithm 1 as written")
    axes.loglog(gpus, [row.floor for row in rows], "--", color="grey", label="allowed")
    axes.set(xlabel="GPUs", ylabel="seconds")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
