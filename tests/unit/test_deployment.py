"""How a deployment loses a MoE server and how it ends, without starting one."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_expertplex.config import ExpertPlexConfig
from vllm_expertplex.layout import Layout, SlotOwner
from vllm_expertplex.serve import deployment as module
from vllm_expertplex.serve import engines
from vllm_expertplex.serve.deployment import Deployment
from vllm_expertplex.serve.engines import DeploymentError


class Slot:
    failed = False

    def fail(self) -> None:
        self.failed = True


class Board:
    """Of a server whose last sign of life is `age_s` old."""

    def __init__(self) -> None:
        self.age_s, self.stopped = 0.0, False

    def heartbeat_age_s(self) -> float:
        return self.age_s

    def stop(self) -> None:
        self.stopped = True


class Process:
    """Takes `takes_s` to end once it is told to; a hung one does not even when killed."""

    name = "expertplex-moe"

    def __init__(self, takes_s: float, hangs: bool = False) -> None:
        self._ends, self._hangs, self.killed = time.monotonic() + takes_s, hangs, False

    def is_alive(self) -> bool:
        return self._hangs or (not self.killed and time.monotonic() < self._ends)

    def join(self, timeout: float | None = None) -> None:
        assert timeout is not None, "waits for ever"
        until = time.monotonic() + timeout
        while self.is_alive() and time.monotonic() < until:
            time.sleep(0.01)

    def kill(self) -> None:
        self.killed = True


def running(*processes: Process, **options: Any) -> Deployment:
    """A deployment that has started."""
    made: Any = object.__new__(Deployment)
    made.config = ExpertPlexConfig(layout="1P1D2E", **options)
    made.layout = made.config.parsed_layout
    made.slots = {
        (SlotOwner(source), moe): Slot()
        for source in made.layout.attention_servers
        for moe in made.layout.moe_servers
    }
    made.boards = [Board() for _ in made.layout.moe_servers]
    made.records = {server.name: None for server in made.layout}
    made.engines, made.lost, made._processes = [], set(), list(processes)
    made._failure, made._on_failure, made._stopping = None, None, False
    return made


def test_only_who_waits_for_the_lost_moe_server_is_told_that_it_is_gone() -> None:
    """Else an attention server would name the first one it looks at."""
    ours: Any = running()
    ours.boards[1].age_s = ours.config.heartbeat_timeout_s + 1
    ours._check_heartbeats()
    assert "moe-1 has shown no progress" in ours.failure
    assert {moe.name for (_, moe), slot in ours.slots.items() if slot.failed} == {"moe-1"}
    assert ours.lost == {"moe-1"}


def test_the_end_does_not_wait_for_a_process_that_cannot_be_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_STOP_TIMEOUT_S", 0.05)
    hung = Process(0, hangs=True)
    ours: Any = running(hung)
    ours.shutdown()
    assert hung.killed
    assert all(board.stopped for board in ours.boards)


@pytest.mark.parametrize("trace", [None, "trace.json"])
def test_a_server_may_finish_writing_its_trace(
    monkeypatch: pytest.MonkeyPatch, trace: str | None
) -> None:
    monkeypatch.setattr(module, "_STOP_TIMEOUT_S", 0.05)
    busy = Process(0.3)
    running(busy, trace=trace).shutdown()
    assert busy.killed == (trace is None)


def test_a_start_that_takes_too_long_names_who_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(engines, "kill_servers", lambda run_dir: ended.set())

    def make_engine(config: Any, index: int) -> Any:
        if index:
            ended.wait(20)
            raise RuntimeError("killed")

    servers = Layout.parse("1P1D1E").attention_servers
    with pytest.raises(DeploymentError, match=r"decode-0 .* startup_timeout_s = 0\.2 s"):
        engines.start_engines(tmp_path, servers, [{}, {}], make_engine, timeout_s=0.2)  # type: ignore[list-item]
    assert ended.is_set()


def model(runner: str = "generate") -> Any:
    config = SimpleNamespace(
        model="m", architectures=["MoE"], get_num_experts=lambda: 64, runner_type=runner
    )
    return SimpleNamespace(model_config=config)


def test_a_model_that_does_not_generate_is_refused() -> None:
    """Its requests have no sampling parameters; vLLM runs embedding models without being told."""
    with pytest.raises(DeploymentError, match=r"m \(MoE\) .*pooling.*generat"):
        module._check_model(model("pooling"), ExpertPlexConfig())


def test_more_attention_servers_than_a_moe_server_takes_are_refused() -> None:
    module._check_model(model(), ExpertPlexConfig(layout="16P16D1E"))
    with pytest.raises(DeploymentError, match=r"33 attention servers.*32"):
        module._check_model(model(), ExpertPlexConfig(layout="16P17D1E"))
    module._check_model(model(), ExpertPlexConfig(layout="8P8D1E", tensor_parallel_size=2))
    with pytest.raises(DeploymentError, match=r"17 attention servers of 2 ranks.*32"):
        module._check_model(model(), ExpertPlexConfig(layout="8P9D1E", tensor_parallel_size=2))


def test_more_slots_than_the_persistent_kernel_serves_are_refused_on_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its controller has one lane per slot; it would say so when all experts are loaded."""
    most = ExpertPlexConfig(layout="8P16D1E", tbo_tokens=512)
    more = ExpertPlexConfig(layout="8P17D1E", tbo_tokens=512)
    ranks = ExpertPlexConfig(layout="5P7D1E", tensor_parallel_size=2, tbo_tokens=512)
    for config in (most, more, ranks):
        module._check_model(model(), config)  # on CPUs
    monkeypatch.setattr(type(module.current_platform), "is_cpu", lambda self: False)
    module._check_model(model(), most)
    module._check_model(model(), ExpertPlexConfig(layout="8P17D1E"))
    with pytest.raises(DeploymentError, match=r"8P17D1E.* 33 slots.*at most 32.*tbo_tokens = 0"):
        module._check_model(model(), more)
    with pytest.raises(DeploymentError, match=r"parallel_size 2.* 34 slots"):
        module._check_model(model(), ranks)
