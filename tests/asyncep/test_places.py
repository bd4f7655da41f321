"""Which GPU each engine gets."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_expertplex.asyncep.config import AsyncEPConfig
from vllm_expertplex.asyncep.deployment import _share, place
from vllm_expertplex.serve.engines import DeploymentError
from vllm_expertplex.serve.placement import Place


def test_each_engine_has_a_gpu_of_its_own() -> None:
    places = place(AsyncEPConfig(gpus=2).servers, ["4", "6", "7"])
    assert places == {"asyncep-0": Place("4"), "asyncep-1": Place("6")}


def test_engines_share_the_only_gpu() -> None:
    places = place(AsyncEPConfig(gpus=3).servers, ["5"])
    assert list(places.values()) == [Place("5", 3)] * 3


def test_too_few_gpus_are_an_error() -> None:
    with pytest.raises(DeploymentError, match="3 needs as many GPUs, 2 are visible"):
        place(AsyncEPConfig(gpus=3).servers, ["0", "1"])


def test_engines_that_share_a_gpu_must_be_told_how_much_kv_they_have() -> None:
    cache = SimpleNamespace(kv_cache_memory_bytes=None, gpu_memory_utilization=0.9)
    config: Any = SimpleNamespace(cache_config=cache)
    with pytest.raises(DeploymentError, match="--kv-cache-memory-bytes"):
        _share(config, 3)
    cache.kv_cache_memory_bytes = 1 << 30
    _share(config, 3)
    assert cache.gpu_memory_utilization == pytest.approx(0.3)
