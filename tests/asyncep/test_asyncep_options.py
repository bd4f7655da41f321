"""The command line of `--executor asyncep`: options, and every refusal by name."""

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_expertplex.asyncep import options
from vllm_expertplex.asyncep.config import AsyncEPConfig, AsyncEPSettings
from vllm_expertplex.asyncep.executor import EXECUTOR
from vllm_expertplex.serve import options as shared
from vllm_expertplex.serve.command import serve

Parse = Callable[..., argparse.Namespace]


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    return make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))


@pytest.fixture
def parse(parser: FlexibleArgumentParser, monkeypatch: pytest.MonkeyPatch) -> Parse:
    for name in shared._ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "0")  # set by what is tested; undone afterwards

    def parse(*arguments: str) -> argparse.Namespace:
        return parser.parse_args(["model", "--executor", "asyncep", *arguments])

    return parse


def _refused(args: argparse.Namespace, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        options.set_up(args)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_the_serve_command_is_taken_over(parse: Parse) -> None:
    assert parse().dispatch_function is serve


def test_options_reach_every_process(parse: Parse) -> None:
    args = parse("--asyncep-gpus", "3")
    assert options.set_up(args) >= 1
    settings = AsyncEPSettings.from_additional_config(args.additional_config)
    assert settings == AsyncEPSettings(AsyncEPConfig(gpus=3), AsyncEPSettings.FRONT)
    assert args.distributed_executor_backend == EXECUTOR
    assert args.enforce_eager
    assert args.block_size == 32


def test_a_model_can_be_measured_without_its_checkpoint(parse: Parse) -> None:
    args = parse("--load-format", "dummy")
    options.set_up(args)
    assert args.load_format == "dummy"


@pytest.mark.parametrize(("engines", "cached"), [("1", True), ("2", False)])
def test_images_go_to_each_of_several_engines_whole(
    parse: Parse, engines: str, cached: bool
) -> None:
    args = parse("--asyncep-gpus", engines)
    options.set_up(args)
    assert (args.mm_processor_cache_gb > 0) is cached


def test_no_refusal_sends_people_to_the_other_executors_options() -> None:
    for refusal in options._refusals():
        assert "expertplex" not in refusal.instead, refusal.option
        assert "prefill" not in refusal.instead, refusal.option


def test_the_users_block_size_stays(parse: Parse) -> None:
    args = parse("--block-size", "64")
    options.set_up(args)
    assert args.block_size == 64


def test_a_configuration_file_is_read_and_the_command_line_wins(
    parse: Parse, tmp_path: Path
) -> None:
    file = tmp_path / "c.toml"
    file.write_text("gpus = 4\nmax_wait_ms = 5.0\nkv_free = true\n")
    args = parse("--asyncep-config", str(file), "--asyncep-gpus", "2")
    options.set_up(args)
    settings = AsyncEPSettings.from_additional_config(args.additional_config)
    assert settings is not None
    assert settings.config == AsyncEPConfig(gpus=2, max_wait_ms=5.0, kv_free=True)
    assert args.enable_prefix_caching is False
    assert args.enable_chunked_prefill is False


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--tensor-parallel-size", "2"], "use --asyncep-gpus"),
        (["--enable-expert-parallel"], "experts are always split"),
        (["--cpu-offload-gb", "4"], "offload_layers"),
        (["--expertplex-layout", "1P1D1E"], "needs --executor expertplex"),
        (["--asyncep-gpus", "0"], "the options are: gpus"),
        (["--asyncep-config", "/no/such/file"], "No such file"),
    ],
)
def test_refusals(
    parse: Parse, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    assert reason in _refused(parse(*arguments), capsys)


def test_pooling_models_are_served(parse: Parse) -> None:
    options.set_up(parse("--runner", "pooling"))


@pytest.mark.parametrize("text", ["{", '{"gpu": 2}', '{"gamma": 0.5}', "[]"])
def test_a_bad_file_is_named(
    parse: Parse, capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str
) -> None:
    file = tmp_path / "c.json"
    file.write_text(text)
    assert f"--asyncep-config {file}: " in _refused(parse("--asyncep-config", str(file)), capsys)


def test_without_kv_its_opposites_are_refused(
    parse: Parse, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "c.json"
    file.write_text('{"kv_free": true}')
    args = parse("--asyncep-config", str(file), "--enable-prefix-caching")
    assert "kv_free keeps nothing" in _refused(args, capsys)
