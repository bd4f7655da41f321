"""The whole parity matrix: `python -m tests.e2e.parity.matrix`.

For each model and dtype plain vLLM answers once, then every layout answers the same requests. The
results are added to `build/parity/results.json`, so it can be run in pieces, and `docs/parity.md`
is written from all of them.
"""

import argparse
import datetime
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from vllm_expertplex.layout import Layout

from ..models import MODELS, baseline, checkpoint
from ..server import ServerError, interrupt_on_sigterm, serve
from . import report
from .suite import Answers, batch_invariant, judge, nonsense, requests, run

ROOT = Path(__file__).resolve().parents[3]
WORK = ROOT / "build" / "parity"
LAYOUTS = ("1P1D1E", "2P1D2E", "1P2D3E")
DTYPES = ("bfloat16", "float32")
# Plain vLLM compared with itself: what differs there as well depends on a server's history, on what
# it has cached, or on which requests share a step.
CONTROLS = {
    "plain": (),
    "plain-uncached": ("--no-enable-prefix-caching",),
    "plain-alone": ("--max-num-seqs", "1"),
}


def main() -> int:
    """Returns 0 when every answer was equal, 1 when one differed, 2 when a server failed."""
    args = _parse()
    interrupt_on_sigterm()
    rows: list[report.Row] = []
    failed = False
    for model in args.models:
        for dtype in args.dtypes:
            try:
                _pair(model, dtype, args.layouts, rows)
            except ServerError as error:
                failed = True
                print(f"{model} {dtype}: {error}", file=sys.stderr)
    report.show(rows)
    if rows and not args.no_docs:
        everything = report.save([], WORK / "results.json")
        (ROOT / "docs" / "parity.md").write_text(report.markdown(everything))
    ours = [row for row in rows if row.layout not in CONTROLS]
    return 2 if failed else int(not all(row.passed for row in ours))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.e2e.parity.matrix",
        description="Compare ExpertPlex with plain vLLM, response by response.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument(
        "--layouts", nargs="+", metavar="xPyDzE", default=LAYOUTS,
        help=f"{' and '.join(CONTROLS)} compare plain vLLM with itself: controls",
    )  # fmt: skip
    parser.add_argument("--no-docs", action="store_true", help="leave docs/parity.md alone")
    args = parser.parse_args()
    for layout in args.layouts:
        if layout not in CONTROLS:
            try:
                Layout.parse(layout)
            except ValueError as error:
                parser.error(str(error))
    return args


def _pair(model: str, dtype: str, layouts: list[str], rows: list[report.Row]) -> None:
    """One model and dtype: the baseline, then every layout. Adds to `rows` as it goes."""
    plain, plain_start_s = _answers(model, dtype, None, None)
    for layout in layouts:
        ours, start_s = _answers(model, dtype, layout, plain)
        verdicts = judge(plain, ours, dtype)
        rows.append(
            report.Row(
                model=model,
                dtype=dtype,
                layout=layout,
                date=datetime.date.today().isoformat(),
                commit=_commit(),
                groups=report.scores(verdicts),
                max_logprob_difference=max(v.max_float_difference for v in verdicts),
                differing=[f"{v.key}: {v.differences[0]}" for v in verdicts if v.differences],
                nonsense=nonsense(ours, requests(plain.probe, sense=model == "demo")),
                batch_invariant=batch_invariant(plain, dtype),
                plain_start_s=plain_start_s,
                start_s=start_s,
            )
        )
        report.save(rows, WORK / "results.json")


def _answers(
    model: str, dtype: str, layout: str | None, plain: Answers | None
) -> tuple[Answers, float]:
    """Start a server (`layout` None or a control: plain vLLM), ask it everything, stop it."""
    name = f"{model} {dtype} {layout or 'baseline'}"
    console = Console(stderr=True)
    plain_vllm = layout is None or layout in CONTROLS
    with console.status(f"{name}: starting") as status:
        with serve(
            baseline(model) if plain_vllm else checkpoint(model),
            WORK / "logs" / f"{name.replace(' ', '-')}.log",
            layout=None if plain_vllm else layout,
            options=("--dtype", dtype, *CONTROLS.get(layout or "", ())),
        ) as server:
            answers = run(
                server,
                plain and plain.probe,
                sense=model == "demo",
                progress=lambda what, done, total: status.update(f"{name}: {done}/{total} {what}"),
            )
        console.print(f"{name}: started in {server.start_s:.0f} s, {len(answers.single)} answers")
    return answers, server.start_s


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
