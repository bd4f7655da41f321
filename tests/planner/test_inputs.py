"""What `plan` says of inputs that cannot be: one line, exit code 2, before any search."""

import argparse
import json
import math

import pytest

from vllm_expertplex.planner import cli
from vllm_expertplex.planner.assumptions import Assumptions
from vllm_expertplex.planner.assumptions import override as assume
from vllm_expertplex.planner.hardware import GPUS
from vllm_expertplex.planner.hardware import override as change_gpu
from vllm_expertplex.planner.plan import read_plan


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args(["minimax-m2.7", "--gpu", "h800", "--brief", *words]))


@pytest.mark.parametrize("name", [n for n in Assumptions.__struct_fields__ if n != "buffers"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "1e300", "", "x"])
def test_no_assumption_takes_what_it_cannot_be(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"--set {name}="):
        assume(Assumptions(), [f"{name}={value}"])


@pytest.mark.parametrize(
    "change",
    [
        "sm_step=0", "masked_tile=0", "contiguous_tile=0", "masked_tile=1e6", "decode_slots=0",
        "prefill_tokens=0",
        "max_prefill_requests=0", "cluster=0", "sm_step=1.5", "ttft_share=0", "ttft_share=5",
        "memory_utilisation=0", "memory_utilisation=88", "hbm_saturation=0", "combine_bytes=0",
        "pcie_bytes_per_s=0", "routing_sigma=1000", "buffers=worse", "buffers=", "ttft_share",
    ],
)  # fmt: skip
def test_an_assumption_out_of_its_range_is_named(change: str) -> None:
    with pytest.raises(ValueError, match=r"--set .*expected"):
        assume(Assumptions(), [change])


@pytest.mark.parametrize(
    "change",
    [
        "memory_bytes=0", "memory_bytes=nan", "memory_bytes=inf", "memory_bytes=-1", "sms=0",
        "sms=1", "sms=inf", "sms=13.5", "gpus_per_node=0", "gpus_per_node=-8", "fp8_flops=0",
        "bf16_flops=-1", "hbm_bytes_per_s=0", "nvlink_bytes_per_s=0", "efficiency.gemm=0",
        "efficiency.gemm=3", "efficiency.gemm=1e-300", "bf16_flops=1e-300",
        "efficiency.hbm=nan", "sms", "sms=",
    ],
)  # fmt: skip
def test_a_gpu_that_cannot_be_is_refused(change: str) -> None:
    with pytest.raises(ValueError, match=r"--gpu-set .*expected"):
        change_gpu(GPUS["h800"], [change])


def test_values_in_range_are_taken() -> None:
    changed = assume(Assumptions(), ["sm_step=1e1", "ttft_share=1", "buffers=average"])
    assert (changed.sm_step, changed.ttft_share, changed.buffers) == (10, 1.0, "average")
    gpu = change_gpu(GPUS["h800"], ["memory_bytes=96e9", "efficiency.hbm=0.5"])
    assert (gpu.memory_bytes, gpu.efficiency.hbm) == (96e9, 0.5)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--ttft", "nan"], "positive seconds"),
        (["--tpot", "inf"], "positive seconds"),
        (["--gpus", "0"], "expected 1 to"),
        (["--gpus", "1000000000000"], "expected 1 to"),
        (["--workload", "²/²"], "expected INPUT/OUTPUT"),
        (["--set", "sm_step=500"], "132 SMs"),
        (["--layout", ""], "expected xPyDzE"),
        (["--routing", ""], "routing histogram"),
        (["--profile", ""], "profile"),
        (["--json", "--compare"], "--json"),
        (["--executor", "asyncep", "--workload", "4000/1", "--output", "x"], "--output"),
        (["--executor", "asyncep", "--workload", "4000/1", "--compare"], "--compare"),
        (["--executor", "asyncep", "--workload", "4000/1", "--layout", "1P1D1E"], "--layout"),
        (["--gpu", "tpu"], "known are"),
    ],
)
def test_bad_usage_is_one_line_and_exits_2(words, expected, capsys) -> None:
    assert run(*words) == 2
    shown = capsys.readouterr()
    assert expected in shown.err
    assert shown.err.count("\n") == 1
    assert not shown.out


def test_a_target_far_below_the_floor_names_the_same_floor(capsys) -> None:
    floors = []
    for asked in ("0.01", "1e-300"):
        assert run("--ttft", asked, "--set", "sm_step=33") == 1
        floors.append(float(capsys.readouterr().err.split("a TTFT of ")[1].split(" s")[0]))
    assert floors[1] == pytest.approx(floors[0], rel=0.02)


@pytest.mark.parametrize("option", ["--routing", "--profile", "--workload"])
def test_a_file_that_cannot_be_read_is_named(option: str, tmp_path, capsys) -> None:
    noise = tmp_path / "noise.jsonl"
    noise.write_bytes(b"\xff\xfe\x00\x80")
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"a": 1,')
    for path in (tmp_path, tmp_path / "none", noise, broken):
        assert run(option, str(path)) == 2
        shown = capsys.readouterr().err
        assert str(path) in shown
        assert shown.count("\n") == 1


@pytest.mark.parametrize("text", ['{"a": 1}', "3", '["a"]', "[[1, 2], [3]]", "[]", "[NaN]"])
def test_a_histogram_of_another_form_is_refused(text: str, tmp_path, capsys) -> None:
    path = tmp_path / "histogram.json"
    path.write_text(text)
    assert run("--routing", str(path)) == 2
    assert f"routing histogram {path}" in capsys.readouterr().err


def test_where_a_plan_cannot_be_written_is_said_before_the_search(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "find_plan", lambda *_: pytest.fail("searched"))
    for path in (tmp_path, tmp_path / "none" / "plan.json", ""):
        assert run("--output", str(path)) == 2
        assert "--output" in capsys.readouterr().err


def test_a_full_disk_is_no_traceback(capsys) -> None:
    assert run("--output", "/dev/full") == 2
    assert "/dev/full: No space left" in capsys.readouterr().err


def test_a_plan_of_another_version_is_told_from_a_broken_one(tmp_path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"version": 2, "layouts": []}))
    with pytest.raises(ValueError, match="found version 2, expected 1"):
        read_plan(str(path))
    with pytest.raises(ValueError, match="No such file"):
        read_plan(str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("field", "value"), [("layout", "9X"), ("gpus", 0), ("decode_sms", -1), ("goodput", math.inf)]
)
def test_a_plan_with_a_value_that_cannot_be_is_refused(field, value, tmp_path, capsys) -> None:
    path = tmp_path / "plan.json"
    assert run("--output", str(path)) == 0
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(ValueError, match=str(path)):
        read_plan(str(path))


def test_names_with_brackets_are_shown_as_they_are(tmp_path, capsys) -> None:
    folder = tmp_path / "[red]model" / "[" / "bold]"  # a closing tag, to a terminal's markup
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(
        '{"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "num_hidden_layers": 2,'
        '"num_attention_heads": 4, "num_local_experts": 8, "num_experts_per_tok": 2}'
    )
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    words = [str(folder), "--brief", "--workload", "64/16", "--gpus", "3"]
    assert cli.run(parser.parse_args([*words, "--output", str(folder / "plan.json")])) == 0
    shown = capsys.readouterr().out.replace("\n", "")
    assert str(folder / "config.json") in shown
    assert f"written to {folder / 'plan.json'}" in shown


def test_a_narrow_terminal_loses_no_figure(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert run() == 0
    assert "…" not in capsys.readouterr().out


@pytest.mark.parametrize("node", [1, 2, 4])
def test_nodes_too_small_for_every_role_are_split_freely(node: int, capsys) -> None:
    words = ["--gpus", "8", "--gpu-set", f"gpus_per_node={node}", "--ttft", "5", "--tpot", "1"]
    assert run(*words) == 0
    if node < 3:
        assert run(*words, "--placement", "alike") == 2
        assert "nodes of 3 GPUs or more" in capsys.readouterr().err


def test_a_description_that_nothing_can_run_on_is_blamed(capsys) -> None:
    words = ["--gpu-set", "nvlink_bytes_per_s=0.001", "--set", "sm_step=66"]
    assert run(*words) == 1
    assert "check --gpu-set" in capsys.readouterr().err


def test_a_layout_is_planned_on_the_gpus_it_takes(capsys) -> None:
    """And not spread over the nodes of GPUs that it leaves alone."""
    plans = []
    for gpus in ("8", "24"):
        assert run("--layout", "1P3D4E", "--gpus", gpus, "--json") == 0
        plans.append(json.loads(capsys.readouterr().out))
    assert plans[0] == plans[1]
    assert plans[0]["gpus"] == 8
