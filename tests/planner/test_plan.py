"""The plan command: files, reasons, and what it says when nothing works."""

import argparse
import json

import pytest

from vllm_expertplex.planner import cli
from vllm_expertplex.planner.assumptions import REASONS, Assumptions
from vllm_expertplex.planner.plan import read_plan


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args(list(words)))


COARSE = ("--set", "sm_step=33")  # few SM budgets, for tests that search many times


def test_a_plan_file_reads_back(tmp_path, capsys) -> None:
    path = str(tmp_path / "plan.json")
    assert run("minimax-m2.7", "--gpu", "h800", "--output", path) == 0
    plan = read_plan(path)
    assert plan.layout == "1P3D4E"
    assert 0 < plan.decode_sms < plan.gpu_sms
    assert plan.max_decode_batch * 3 >= plan.decode.batch
    assert plan.goodput == pytest.approx(min(plan.prefill.rate, plan.decode.rate))
    shown = capsys.readouterr().out
    assert "fewer MoE servers do not fit" in shown
    for name in REASONS:
        assert name in shown


def test_json_output_is_only_json(capsys) -> None:
    assert run("minimax-m2.7", "--gpu", "h800", "--json") == 0
    assert json.loads(capsys.readouterr().out)["layout"] == "1P3D4E"


def test_every_assumption_has_its_reason() -> None:
    assert set(REASONS) == set(Assumptions.__struct_fields__)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["glm-5.1-fp8", "--gpu", "h800"], "at least 14 of these GPUs"),
        (["minimax-m2.7", "--gpus", "2"], "at least 3"),
        (["minimax-m2.7", "--ttft", "0.01"], "what would do: a TTFT of"),
        (["minimax-m2.7", "--tpot", "0.004"], "what would do: a TPOT of"),
        (["minimax-m2.7", "--ttft", "0.01", "--tpot", "0.004"], "together"),
        (["minimax-m2.7", "--layout", "1P1D1E"], "cannot serve this load"),
    ],
)
def test_what_cannot_be_served_says_what_would_do(words, expected, capsys) -> None:
    assert run(*words, *COARSE) == 1
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["minimax-m2.7", "--gpu", "tpu"], "known are h800, h100, h200, b200"),
        (["minimax-m2.7", "--workload", "lots"], "expected INPUT/OUTPUT"),
        (["minimax-m2.7", "--set", "speed=2"], "assumption 'speed' is unknown"),
        (["minimax-m2.7", "--gpu-set", "name=2"], "no such number"),
        (["minimax-m2.7", "--layout", "1P2D3X"], "expected xPyDzE"),
        (["minimax-m2.7", "--layout", "8P8D8E"], "more than the 8 GPUs"),
        (["minimax-m2.7", "--ttft", "-1"], "positive seconds"),
        (["minimax-m2.7", "--gpus", "12", "--placement", "alike"], "whole nodes"),
    ],
)
def test_impossible_inputs_are_named(words, expected, capsys) -> None:
    assert run(*words, *COARSE) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(("target", "asked"), [("tpot", "0.004"), ("ttft", "0.01")])
def test_the_floor_it_names_is_the_floor(target, asked, capsys) -> None:
    assert run("minimax-m2.7", f"--{target}", asked, *COARSE) == 1
    named = capsys.readouterr().err.split(f"a {target.upper()} of ")[1].split(" s")[0]
    assert run("minimax-m2.7", f"--{target}", named, "--brief", *COARSE) == 0
    assert run("minimax-m2.7", f"--{target}", str(float(named) * 0.97), "--brief", *COARSE) == 1


def test_the_gpu_count_it_names_is_enough(capsys) -> None:
    assert run("glm-5.1-fp8", "--gpu", "h800", "--ttft", "5", "--tpot", "0.1") == 1
    needed = capsys.readouterr().err.split("at least ")[1].split(" ")[0]
    words = ["glm-5.1-fp8", "--gpu", "h800", "--ttft", "5", "--tpot", "0.1", "--brief", *COARSE]
    assert run(*words, "--gpus", needed) == 0
    assert run(*words, "--gpus", str(int(needed) - 1)) == 1


def test_a_broken_plan_file_is_named(tmp_path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match="vllm-expertplex plan MODEL"):
        read_plan(str(path))
