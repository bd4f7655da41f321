"""The simulate command."""

import argparse
import json

import msgspec
import pytest

from vllm_expertplex.planner.plan import write_plan
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
    assert run("--trace", str(trace)) == 2
    assert "no arrival times" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--modes", "magic"], "expected all, or some of"),
        (["--event", "5:explode:decode"], "SECONDS:fail|add"),
        (["--event", "nan:fail:decode"], "SECONDS:fail|add"),
        (["--event", "inf:fail:decode"], "SECONDS:fail|add"),
        (["--event", "x:fail:decode"], "SECONDS:fail|add"),
        (["--event=-1:fail:decode"], "SECONDS:fail|add"),
        (["--event", "1e9:fail:decode", "--rates", "5", "--requests", "20"], "after the last"),
        (["--seeds", "99"], "1 to 10"),
        (["--rates", "-3"], "requests per second"),
        (["--rates", "0"], "requests per second"),
        (["--rates", "nan"], "requests per second"),
        (["--rates", "inf"], "requests per second"),
        (["--rates", "1e-300"], "requests per second"),
        (["--rates", "5,abc"], "requests per second"),
        (["--rates", ","], "requests per second"),
        (["--rates", ""], "requests per second"),
        (["--requests", "0"], "--requests 0"),
        (["--requests", "1000000000000"], "--requests 1000000000000"),
        (["--longest", "1"], "--longest 1"),
        (["--modes", "pdd", "--layout", "1P3D4E"], "--layout"),
        (["--modes", "pdd", "--event", "1:fail:decode"], "--event"),
        (["--plan", "plan.json", "--layout", "1P3D4E"], "not both"),
        (["--plan", ""], "plan"),
        (["--layout", "1P3D4E", "--gpus", "16"], "give --gpus 8"),
        (["--plan", "/none/plan.json"], "No such file"),
        (["--goodput", "--rates", "5"], "--rates"),
        (["--goodput", "--trace", "t.csv"], "--trace"),
        (["--goodput", "--event", "1:fail:decode"], "--event"),
        (["--goodput", "--plot", "p.png"], "--plot"),
        (["--trace", "/none/t.csv"], "No such file"),
        (["--trace", "t.csv", "--rates", "5"], "--rates"),
        (["--trace", "t.csv", "--seeds", "2"], "--seeds"),
        (["--speed", "2"], "--trace"),
        (["--speed", "nan", "--trace", "t.csv"], "--speed"),
        (["--speed", "0", "--trace", "t.csv"], "--speed"),
        (["--plot", "curve"], ".png or .svg"),
        (["--plot", "curve.xyz"], ".png or .svg"),
        (["--plot", "/none/curve.png"], "--plot"),
        (["--json", "/none/runs.json"], "--json"),
        (["--json", "/tmp"], "--json"),
    ],
)
def test_impossible_inputs_are_named(words, expected, capsys) -> None:
    assert run(*words) == 2
    shown = capsys.readouterr().err
    assert expected in shown
    assert shown.count("\n") == 1


def test_a_plan_for_something_else_is_refused(tmp_path, capsys, m2) -> None:
    path = str(tmp_path / "plan.json")
    for changes, expected in (
        ({"gpus": 16}, "16 GPUs"),
        ({"model": "glm-5.1-fp8"}, "glm-5.1-fp8"),
        ({"gpu": "b200"}, "b200"),
    ):
        write_plan(msgspec.structs.replace(m2[1], **changes), path)
        assert run("--plan", path, "--rates", "5") == 2
        assert expected in capsys.readouterr().err
    write_plan(m2[1], path)
    assert run("--plan", path, "--rates", "5", "--requests", "20") == 0


def test_no_mode_that_can_serve_is_a_failure(capsys) -> None:
    assert run("--gpus", "2", "--modes", "pdd,colocated", "--rates", "5") == 1
    assert "leave no room" in capsys.readouterr().out


def test_requests_that_come_at_once_have_no_rate(tmp_path, capsys) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("timestamp,input_tokens,output_tokens\n5,100,5\n5,100,5\n")
    assert run("--trace", str(trace)) == 0
    assert "at once" in capsys.readouterr().out


@pytest.mark.parametrize(
    "layers", [{"layer_types": ["sliding_attention"] * 2, "sliding_window": 128},
               {"layer_types": ["linear_attention"] * 2, "linear_num_value_heads": 4,
                "linear_num_key_heads": 2}],
)  # fmt: skip
def test_a_model_without_kv_per_token_is_refused(layers, tmp_path, capsys) -> None:
    config = {
        "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2, **layers,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    words = [str(tmp_path), "--rates", "5", "--modes", "colocated"]
    assert cli.run(parser.parse_args(words)) == 1
    assert "keeps KV per token" in capsys.readouterr().out.replace("\n", " ")


def test_a_curve_is_drawn(tmp_path) -> None:
    picture = tmp_path / "curve.png"
    assert run("--rates", "5,10", "--requests", "50", "--plot", str(picture)) == 0
    assert picture.stat().st_size > 1000
