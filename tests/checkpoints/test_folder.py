"""A checkpoint looks finished only when it is."""

from pathlib import Path

import pytest

from vllm_expertplex.checkpoints.folder import CONFIG, written_whole


def write(folder: Path, text: str) -> None:
    (folder / CONFIG).write_text(text)
    (folder / "model.safetensors").write_text(text)


def write_half(out: Path) -> None:
    with written_whole(out) as folder:
        write(folder, "half")
        raise OSError("disk full")


def test_all_files_arrive_and_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "models" / "tiny"
    with written_whole(out) as folder:
        write(folder, "new")
        assert not (out / CONFIG).exists()
    assert {file.name: file.read_text() for file in out.iterdir()} == {
        CONFIG: "new",
        "model.safetensors": "new",
    }


def test_an_older_checkpoint_is_replaced_or_stays_whole(tmp_path: Path) -> None:
    write(tmp_path, "old")
    with pytest.raises(OSError, match="disk full"):
        write_half(tmp_path)
    assert sorted(file.read_text() for file in tmp_path.iterdir()) == ["old", "old"]
    with written_whole(tmp_path) as folder:
        write(folder, "new")
    assert sorted(file.read_text() for file in tmp_path.iterdir()) == ["new", "new"]
