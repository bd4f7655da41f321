"""Without a layout: all GPUs there are get one, planned from three on."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm.platforms
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_expertplex.config import ExpertPlexConfig
from vllm_expertplex.planner.model_catalogue import CATALOGUE
from vllm_expertplex.serve import options, unplanned

Check = Callable[..., tuple[argparse.Namespace, ExpertPlexConfig]]


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    given: list[str] = []
    monkeypatch.setattr(
        unplanned.logger, "warning", lambda text, *values: given.append(text % values)
    )
    return given


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """The serve command's options on a machine with these GPUs."""

    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))

    def run(
        model: str, gpus: int, *given: str, gpu: str = "NVIDIA H200", name: str | None = None
    ) -> tuple[argparse.Namespace, ExpertPlexConfig]:
        (tmp_path / "config.json").write_text(json.dumps(CATALOGUE[model]))
        machine = SimpleNamespace(
            is_cpu=lambda: gpu == "", device_count=lambda: gpus, get_device_name=lambda: gpu
        )
        monkeypatch.setattr(vllm.platforms, "current_platform", machine, raising=False)
        args = parser.parse_args([name or str(tmp_path), "--executor", "expertplex", *given])
        return args, options.check(args)

    return run


def test_all_gpus_of_a_node_are_planned_for(check: Check) -> None:
    args, config = check("minimax-m2.7", 8)
    layout = config.parsed_layout
    assert layout.prefill + layout.decode + layout.moe == 8
    assert config.tensor_parallel_size == 1
    assert 0 < config.decode_sms < 132
    assert args.max_num_seqs is None  # a load that nobody described limits nothing


@pytest.mark.parametrize(
    ("model", "gpus", "layout"),
    [
        ("qwen3-30b-a3b", 1, "1P1D1E"),
        ("qwen3-30b-a3b", 2, "1P1D2E"),
        pytest.param("minimax-m2.7", 3, "1P1D3E", id="experts that fit no single GPU"),
    ],
)
def test_few_gpus_are_shared_as_was_measured_best(
    check: Check, model: str, gpus: int, layout: str
) -> None:
    _, config = check(model, gpus)
    assert config == ExpertPlexConfig(layout=layout, tbo_tokens=2048)


def test_what_a_file_says_is_kept(check: Check, tmp_path: Path) -> None:
    file = tmp_path / "options.toml"
    file.write_text("moe_sm_percent = 33\ntbo_tokens = 77")
    _, config = check("qwen3-30b-a3b", 2, "--expertplex-config", str(file))
    assert config == ExpertPlexConfig(layout="1P1D2E", moe_sm_percent=33, tbo_tokens=77)
    file.write_text('layout = "1P2D2E"')
    _, config = check("qwen3-30b-a3b", 2, "--expertplex-config", str(file))
    assert config == ExpertPlexConfig(layout="1P2D2E")


def test_a_layout_that_is_given_is_taken(check: Check) -> None:
    _, config = check("minimax-m2.7", 8, "--expertplex-layout", "1P2D3E")
    assert config == ExpertPlexConfig(layout="1P2D3E")


@pytest.mark.parametrize("by_file", [False, True])
def test_ranks_of_attention_are_planned_for(check: Check, tmp_path: Path, by_file: bool) -> None:
    file = tmp_path / "ranks.json"
    file.write_text('{"tensor_parallel_size": 2}')
    ranks = ("--expertplex-config", str(file)) if by_file else ("--tensor-parallel-size", "2")
    args, config = check("qwen3-30b-a3b", 8, *ranks)
    layout = config.parsed_layout
    assert (config.tensor_parallel_size, args.tensor_parallel_size) == (2, 2)
    assert 2 * (layout.prefill + layout.decode) + layout.moe == 8


@pytest.mark.parametrize(
    ("gpus", "ranks", "why"),
    [
        (2, 2, "2 ranks on GPUs that MoE servers share is not planned"),
        (4, 2, "need 5 GPUs, found 4"),
        (8, 3, "3 ranks cannot share the attention heads"),
    ],
)
def test_ranks_without_a_plan_are_served_as_asked(
    check: Check, warnings: list[str], gpus: int, ranks: int, why: str
) -> None:
    _, config = check("qwen3-30b-a3b", gpus, "--tensor-parallel-size", str(ranks))
    assert config == ExpertPlexConfig(tensor_parallel_size=ranks)
    assert len(warnings) == 1
    assert why in warnings[0]


@pytest.mark.parametrize(
    "gpu",
    ["NVIDIA A100-SXM4-80GB", "NVIDIA H100 PCIe", "NVIDIA GH200 480GB", "NVIDIA B200"],
)
def test_gpus_that_are_not_planned_for_are_named(
    check: Check, warnings: list[str], gpu: str
) -> None:
    _, config = check("minimax-m2.7", 8, gpu=gpu)
    assert config == ExpertPlexConfig()
    assert len(warnings) == 1
    assert "none of the GPUs it is planned for" in warnings[0]


def test_a_model_on_a_hub_is_called_by_its_name(
    check: Check, warnings: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[object, ...]] = []

    def download(*what: str, **how: object) -> str:
        asked.append((*what, how["revision"], how["token"]))
        return str(tmp_path / "config.json")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    given = ("--revision", "r", "--hf-token", "t", "--tensor-parallel-size", "2")
    check("minimax-m2.7", 5, *given, name="a/b")
    assert asked == [("a/b", "config.json", "r", "t")]
    assert "a/b does not fit" in warnings[0]


def test_cpus_are_not_planned(check: Check, warnings: list[str]) -> None:
    _, config = check("minimax-m2.7", 1, gpu="")
    assert config == ExpertPlexConfig()
    assert not warnings


def test_without_a_gpu_that_is_left_for_the_deployment_to_say(
    check: Check, warnings: list[str]
) -> None:
    _, config = check("minimax-m2.7", 0)
    assert config == ExpertPlexConfig()
    assert not warnings
