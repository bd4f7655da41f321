"""What a deployment on GPUs prepares, with GPUs that are only counted."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.config import CUDAGraphMode

from vllm_expertplex.config import ExpertPlexConfig
from vllm_expertplex.serve import gpu, placement

GIB = 2**30


class Machine:
    """GPUs of 100 GiB, a model whose MoE server needs 30 GiB, and how often MPS was started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run_dir: Path) -> None:
        self.gpus, self.mps, self._run_dir = 1, 0, run_dir
        platform = SimpleNamespace(
            device_count=lambda: self.gpus, get_device_total_memory=lambda: 100 * GIB
        )
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(gpu, "current_platform", platform)
        monkeypatch.setattr(gpu, "moe_bytes", lambda config, layout: 30 * GIB)
        monkeypatch.setattr(gpu.mps, "start", self._start_mps)

    def _start_mps(self, run_dir: Path) -> None:
        assert run_dir == self._run_dir
        self.mps += 1

    def prepare(self, layout: str, utilization: float = 0.9) -> list[SimpleNamespace]:
        """The attention servers' configurations."""
        config = ExpertPlexConfig(layout=layout)
        attention = config.parsed_layout.attention_servers
        configs = [
            SimpleNamespace(
                cache_config=SimpleNamespace(gpu_memory_utilization=utilization),
                compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY),
            )
            for _ in attention
        ]
        gpu.prepare(self._run_dir, config, attention, configs)  # type: ignore[arg-type]
        for server in config.parsed_layout:
            assert placement.read_place(self._run_dir, server) is not None
        return configs


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("layout", "gpus", "shares", "mps"),
    [
        ("1P1D1E", 1, [0.3, 0.3], 1),
        ("1P1D2E", 1, [0.15, 0.15], 1),
        ("1P1D2E", 2, [0.6, 0.6], 1),
        ("1P1D1E", 2, [0.45, 0.45], 1),
        ("1P1D1E", 3, [0.9, 0.9], 0),
    ],
)
def test_attention_servers_share_what_moe_servers_leave(
    machine: Machine, layout: str, gpus: int, shares: list[float], mps: int
) -> None:
    machine.gpus = gpus
    prefill, decode = machine.prepare(layout)
    found = [c.cache_config.gpu_memory_utilization for c in (prefill, decode)]
    assert found == pytest.approx(shares)
    assert machine.mps == mps
    assert prefill.compilation_config.cudagraph_mode == CUDAGraphMode.NONE
    assert decode.compilation_config.cudagraph_mode == CUDAGraphMode.FULL_DECODE_ONLY


def test_experts_that_do_not_fit_are_refused_before_anything_starts(machine: Machine) -> None:
    with pytest.raises(ValueError, match=r"GPU 0 is to hold 1 .* need 30% .*-utilization 0\.3"):
        machine.prepare("1P1D1E", utilization=0.3)
    assert not machine.mps
