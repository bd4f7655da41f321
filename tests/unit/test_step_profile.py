"""Taking a decode step apart, from a trace of which the answer is known."""

import gzip
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import step_profile

LAYERS = 3
KERNELS = (  # name, us, overlapped by the next one for so long
    ("vllm::rms_norm_kernel", 2.0, 0.0),
    ("vllm::reshape_and_cache_flash_kernel", 3.0, 0.0),
    ("expertplex_dispatch_fp8_small", 4.0, 1.0),
    ("expertplex_wait_and_combine", 20.0, 0.0),
)
GAP = 50.0


def trace(folder: Path, steps: int) -> None:
    events, now = [{"cat": "cpu_op", "name": "reshape_and_cache", "ts": 0, "dur": 9}], 0.0
    for _ in range(steps):
        for name, us, overlap in KERNELS * LAYERS:
            events.append({"cat": "kernel", "name": name, "ts": now, "dur": us})
            now += us - overlap
        now += GAP
    folder.mkdir(exist_ok=True)
    path = folder / f"rank0.{steps}.pt.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))


def test_a_step_is_split_without_counting_overlaps_twice(tmp_path: Path) -> None:
    trace(tmp_path, 1)  # no whole step
    trace(tmp_path, 6)
    found = step_profile.of_folder(tmp_path, LAYERS)
    assert found is not None
    assert found.steps == 5
    assert found.period == pytest.approx(LAYERS * 28 + GAP)
    assert sum(found.kinds.values()) == pytest.approx(found.period)
    assert found.kinds["idle"] == pytest.approx(GAP)
    assert found.kinds["dispatch"] == pytest.approx(LAYERS * 4)
    assert found.kinds["MoE servers and combine"] == pytest.approx(LAYERS * 19)


def test_a_trace_without_a_whole_step_says_nothing(tmp_path: Path) -> None:
    trace(tmp_path, 1)
    assert step_profile.of_folder(tmp_path, LAYERS) is None
