"""The command line: lazy imports, exit codes, help that names every subcommand."""

import subprocess
import sys

import pytest

from vllm_expertplex import __version__, cli


def run_cli(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vllm_expertplex.cli", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_help_names_every_subcommand():
    done = run_cli("--help")
    assert done.returncode == 0
    for name in cli.SUBCOMMANDS:
        assert name in done.stdout


@pytest.mark.parametrize("name", cli.SUBCOMMANDS)
def test_every_subcommand_has_help(name):
    done = run_cli(name, "--help")
    assert done.returncode == 0
    assert f"vllm-expertplex {name}" in done.stdout


def test_version():
    assert run_cli("--version").stdout.strip() == f"vllm-expertplex {__version__}"


@pytest.mark.parametrize("args", [(), ("no-such-command",)])
def test_bad_usage_exits_2_and_lists_the_commands(args):
    done = run_cli(*args)
    assert done.returncode == 2
    assert "usage: vllm-expertplex" in done.stderr


def test_one_subcommand_does_not_import_the_others(monkeypatch):
    from vllm_expertplex import doctor

    monkeypatch.setitem(cli.SUBCOMMANDS, "broken", "vllm_expertplex.no_such_module")
    monkeypatch.setattr(doctor, "run", lambda args: 0)
    assert cli.main(["doctor"]) == 0


def test_the_exit_code_is_the_subcommands(monkeypatch):
    from vllm_expertplex import doctor

    monkeypatch.setattr(doctor, "run", lambda args: 7)
    assert cli.main(["doctor"]) == 7


def test_interrupt_is_no_traceback(monkeypatch):
    from vllm_expertplex import doctor

    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "run", interrupted)
    assert cli.main(["doctor"]) == 130


def test_interrupt_while_a_subcommand_is_imported_is_no_traceback(monkeypatch):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", interrupted)
    assert cli.main(["doctor"]) == 130


def run_shell(line: str) -> subprocess.CompletedProcess[str]:
    cli_command = f"{sys.executable} -m vllm_expertplex.cli"
    return subprocess.run(
        ["bash", "-c", line.replace("CLI", cli_command)],
        capture_output=True,
        text=True,
        timeout=120,
    )


PLAN = "CLI plan minimax-m2.7 --gpu h800 --brief"


def test_a_reader_that_goes_away_is_no_traceback():
    done = run_shell(f"{PLAN} --json | head -c 1")
    assert done.stdout == "{"
    assert done.stderr == ""


@pytest.mark.parametrize("option", ["", "--json"])
def test_output_that_cannot_be_written_is_one_line(option):
    done = run_shell(f"{PLAN} {option} > /dev/full")
    assert done.returncode == 1
    assert "No space left" in done.stderr
    assert done.stderr.count("\n") == 1


def test_output_without_unicode_is_no_error():
    done = run_shell("PYTHONIOENCODING=ascii CLI simulate minimax-m2.7 --modes chunked --goodput")
    assert done.returncode == 0
    assert "chunked prefill" in done.stdout


@pytest.mark.parametrize("columns", ["0", "-1", "x", ""])
def test_a_terminal_width_that_cannot_be_is_not_believed(columns):
    done = run_shell(f"COLUMNS={columns} {PLAN}")
    assert done.returncode == 0
    assert "1P3D4E" in done.stdout
