"""What an attention server's executor does to its process's environment, and when."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import envs

from vllm_expertplex.config import ENV_RUN_DIR, ExpertPlexConfig, ServerSettings
from vllm_expertplex.executor.executor import _Attention
from vllm_expertplex.layout import DECODE
from vllm_expertplex.serve.records import write_ports

PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"


class _Compiles:
    """One of vLLM's executors, as far as its compile cache's key is concerned."""

    key: dict[str, object]

    def _init_executor(self) -> None:
        pass

    def compile_or_warm_up_model(self) -> None:
        self.key = envs.compile_factors()


class _Executor(_Attention, _Compiles):
    def __init__(self) -> None:
        settings = ServerSettings(ExpertPlexConfig(), DECODE)
        self.vllm_config = SimpleNamespace(additional_config=settings.to_additional_config())
        self.parallel_config = SimpleNamespace()


def test_a_port_that_differs_between_starts_is_no_part_of_the_compile_cache_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = []
    for port in (41001, 41002):
        run_dir = tmp_path / str(port)
        run_dir.mkdir()
        monkeypatch.setenv(ENV_RUN_DIR, str(run_dir))
        monkeypatch.setenv(PORT, "5600")  # restored afterwards
        monkeypatch.delenv(PORT)
        write_ports(run_dir, {"decode-0": port})
        executor: Any = _Executor()
        executor._init_executor()
        executor.compile_or_warm_up_model()
        keys.append(executor.key)
        assert os.environ[PORT] == str(port)  # for the KV connector, which comes next
    assert keys[0] == keys[1]
