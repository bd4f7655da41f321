"""The command line of the parity scripts: models side by side, rows as JSON.

Owns: options, what becomes of a model that fails. Must not know: what is compared.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from _report import Row, write
from e2e.server import interrupt_on_sigterm


def report(
    benchmark: str,
    description: str | None,
    models: Sequence[str],
    judge: Callable[[str, Path], list[Row]],
) -> None:
    """`judge(model, folder for logs)` prints what it finds and returns its rows. A model that fails
    is printed with its error, and costs no other its rows.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=models, metavar="MODEL")
    parser.add_argument("--logs", type=Path, help="keep the servers' logs in this folder")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    interrupt_on_sigterm()
    rows: list[Row] = []

    def one(model: str, logs: Path) -> None:
        try:
            rows.extend(judge(model, logs))
        except Exception as error:
            print(f"{model}: FAILED: {str(error)[-2000:]}", flush=True)
            return
        write(benchmark, rows, args.json)

    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(len(args.models)) as pool:
        list(pool.map(lambda model: one(model, args.logs or Path(scratch)), args.models))
