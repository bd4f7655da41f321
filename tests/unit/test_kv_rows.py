"""Which layout of the KV cache attention servers take: rows of all layers, if they may."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

from vllm_expertplex.config import ExpertPlexConfig, ServerSettings
from vllm_expertplex.executor import kv_rows
from vllm_expertplex.layout import PREFILL
from vllm_expertplex.serve.deployment import kv_transfer_config

ANY = ["LBNHC", "LBHNC", "BLNHC", "BLHNC"]  # what a backend without a preference reads


class Cache(SimpleNamespace):
    kv_cache_layout: str | None = None

    def get_resolved_kv_cache_layout(self) -> str | None:
        return self.kv_cache_layout


def resolve(supported: list[str], *, mla: bool = False, hybrid: bool = False) -> str:
    settings = ServerSettings(ExpertPlexConfig(layout="1P1D1E"), PREFILL, 0)
    config: Any = SimpleNamespace(
        cache_config=Cache(),
        model_config=SimpleNamespace(use_mla=mla, is_hybrid=hybrid),
        kv_transfer_config=kv_transfer_config(settings, PREFILL),
    )
    return resolve_kv_cache_layout(config, [supported]).name


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    monkeypatch.setattr(kv_rows, "current_platform", SimpleNamespace(is_cpu=lambda: False))


@pytest.mark.usefixtures("gpu")
def test_blocks_are_whole_rows() -> None:
    assert resolve(ANY) == "BLNHC"


@pytest.mark.usefixtures("gpu")
def test_a_backend_that_cannot_read_rows_keeps_its_own() -> None:
    assert resolve(["LBHNC", "BLHNC"]) == "LBHNC"


@pytest.mark.usefixtures("gpu")
def test_the_user_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "LBHNC")
    assert resolve(ANY) == "LBHNC"


@pytest.mark.usefixtures("gpu")
def test_mla_keeps_vllms_own() -> None:
    assert resolve(ANY, mla=True) == ANY[0]


@pytest.mark.usefixtures("gpu")
def test_recurrent_states_keep_nixls_own() -> None:
    assert resolve(ANY, hybrid=True) == "LBHNC"


def test_cpus_keep_vllms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    assert resolve(ANY) == "LBHNC"  # of NIXL's own connector
