"""The simulate command."""

import argparse
import json

import pytest

from vllm_expertplex.simulator import cli


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args(["minimax-m2.7", "--gpu", "h800", *words]))


def test_figures_are_labelled_simulated_and_written(tmp_path, capsys) -> None:
    path = tmp_path / "runs.json"
    words = ["--rates", "5", "--requests", "60", "--modes", "all", "--json", str(path)]
    assert run(*words) == 0
    shown = capsys.readouterr().out
    assert shown.count("SIMULATED") == 5
    assert "prefill-only" in shown  # why AsyncEP has no table
    assert set(json.loads(path.read_text())) == {
        "expertplex", "pdd", "green-context", "colocated", "chunked",
    }  # fmt: skip


def test_a_trace_with_times_is_replayed(tmp_path, capsys) -> None:
    trace = tmp_path / "t.csv"
    rows = "\n".join(f"{i * 0.5},{100 + i},{5}" for i in range(40))
    trace.write_text("timestamp,input_tokens,output_tokens\n" + rows)
    assert run("--trace", str(trace)) == 0
    assert "100.0%" in capsys.readouterr().out
    trace.write_text("input_tokens,output_tokens\n10,5\n")
    assert run("--trace", str(trace)) == 1
    assert "no arrival times" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--modes", "magic"], "expected all, or some of"),
        (["--event", "5:explode:decode"], "SECONDS:fail|add"),
        (["--seeds", "99"], "1 to 10"),
        (["--rates", "-3"], "positive number per second"),
    ],
)
def test_impossible_inputs_are_named(words, expected, capsys) -> None:
    assert run(*words) == 1
    assert expected in capsys.readouterr().err


def test_a_curve_is_drawn(tmp_path) -> None:
    picture = tmp_path / "curve.png"
    assert run("--rates", "5,10", "--requests", "50", "--plot", str(picture)) == 0
    assert picture.stat().st_size > 1000
