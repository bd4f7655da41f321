"""`vllm-expertplex`: the command line around the server; serving itself is `vllm serve`.

Owns the table of subcommands. Each is a module with `HELP`, `add_arguments(parser)` and
`run(args) -> int` (the exit code), imported only when it is asked for: `doctor` has to work where
another one's imports do not.
"""

import argparse
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from vllm_expertplex import __version__

SUBCOMMANDS = {
    "doctor": "vllm_expertplex.doctor",
    "demo": "vllm_expertplex.demo",
    "make-model": "vllm_expertplex.checkpoints.cli",
    "plan": "vllm_expertplex.planner.cli",
    "profile": "vllm_expertplex.planner.profile_cli",
    "simulate": "vllm_expertplex.simulator.cli",
}


class Subcommand(Protocol):
    """What a module in `SUBCOMMANDS` provides."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def build_parser(names: Sequence[str] = tuple(SUBCOMMANDS)) -> argparse.ArgumentParser:
    """The parser for these subcommands, whose modules it imports."""
    parser = argparse.ArgumentParser(
        prog="vllm-expertplex",
        description="Tools for ExpertPlex. To serve a model: "
        "vllm serve MODEL --executor expertplex",
    )
    parser.add_argument("--version", action="version", version=f"vllm-expertplex {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in names:
        module = cast(Subcommand, importlib.import_module(SUBCOMMANDS[name]))
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.HELP,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns its exit code (2: bad arguments, 130: interrupted)."""
    argv = sys.argv[1:] if argv is None else argv
    _prepare_output()
    known = argv[:1] if argv and argv[0] in SUBCOMMANDS else tuple(SUBCOMMANDS)
    try:
        args = build_parser(known).parse_args(argv)
        code = cast(int, args.run(args))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except OSError as error:  # the output's reader went away, or its disk is full
        if not isinstance(error, BrokenPipeError):
            print(f"vllm-expertplex {argv[0]}: {error}", file=sys.stderr)
        _drop_output()
        return 1


def _prepare_output() -> None:
    """Characters that the output's encoding lacks become `?`, and a width of 0 is none."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if os.environ.get("COLUMNS") == "0":
        del os.environ["COLUMNS"]


def _drop_output() -> None:
    """What is left in the buffer cannot be written: the interpreter must not try at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
