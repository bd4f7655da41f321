"""`make-model` from its arguments to the files."""

import argparse
from pathlib import Path

import pytest

from vllm_expertplex.checkpoints import cli


def _run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args(arguments))


def test_writes_a_checkpoint_and_refuses_to_overwrite_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    assert _run("qwen3-moe", "--out", str(out)) == 0
    assert (out / "model.safetensors").exists()
    assert _run("qwen3-moe", "--out", str(out)) == 2
    assert "is not empty" in capsys.readouterr().err
    assert _run("qwen3-moe", "--out", str(out), "--force") == 0


def test_fp8_writes_both_folders(tmp_path: Path) -> None:
    assert _run("minimax-m2", "--out", str(tmp_path / "m"), "--fp8") == 0
    assert {path.name for path in tmp_path.iterdir()} == {"m", "m-dequantized"}


def test_fp8_is_refused_for_other_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run("demo", "--out", str(tmp_path / "m"), "--fp8") == 2
    assert "--fp8 is for minimax-m2, not demo" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--seed", "99999999999999999999999"], "--seed"),
        (["--out", "/dev/null/model"], "/dev/null"),
        (["--out", "/proc/none/model"], "/proc/none"),
    ],
)
def test_what_cannot_be_made_is_said_before_it_is_made(
    words: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run("minimax-m2", "--out", str(tmp_path / "m"), *words) == 2
    assert expected in capsys.readouterr().err
