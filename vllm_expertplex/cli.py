"""`vllm-expertplex`: the command line around the server; serving itself is `vllm serve`.

Owns the table of subcommands. Each is a module with `HELP`, `add_arguments(parser)` and
`run(args) -> int` (the exit code), imported only when it is asked for: `doctor` has to work where
another one's imports do not.
"""

import argparse
import importlib
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
    known = argv[:1] if argv and argv[0] in SUBCOMMANDS else tuple(SUBCOMMANDS)
    try:
        args = build_parser(known).parse_args(argv)
        return cast(int, args.run(args))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
