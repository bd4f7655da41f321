"""A MoE server whose kernel has a tile that never ends: its process ends, and says which tile.

A kernel is made for it in which the last stage of operations of TOKENS tokens hangs; all else is
the real thing, from the prompt to the end of `vllm serve`.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from parity_serve import GRAPHS, OURS

from tests.e2e.failure.conftest import started
from tests.e2e.failure.traffic import Request, Traffic
from tests.e2e.models import checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.e2e, pytest.mark.slow]

TOKENS = 77  # nothing that warms up or is captured has so many
NOTICED_S = 30.0  # the kernel gives a tile 5 s
STOP_S = 40.0
ROOT = Path(__file__).resolve().parents[2]
GATHER = "} else if (m.tile.stage == kGather) {"
REPORT = (
    r"moe-0 \(pid \d+\) is gone: KernelHang: a tile took too long: "
    r"cluster \d+, phase prefill, layer 0, slot \d+, gather, tile \d+"
)


def write_hanging_package(folder: Path) -> None:
    """A copy of this package; gather tiles of operations of TOKENS tokens fall through to the
    branch of the tile that hangs.
    """
    for name in ("vllm_expertplex", "csrc"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    kernel = folder / "csrc" / "apk" / "kernel.cu"
    text = kernel.read_text()
    assert text.count(GATHER) == 1
    kernel.write_text(text.replace(GATHER, f"{GATHER[:-3]} && m.tokens() != {TOKENS}) {{"))


def test_a_hung_tile_ends_its_server_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    write_hanging_package(source)
    # Servers come from Python's fork server, which looks into its working directory first.
    monkeypatch.chdir(source)
    monkeypatch.setenv("PYTHONPATH", f"{source}:{os.environ.get('PYTHONPATH', '')}")
    # An attention server that waits for the lost layer itself would do so for a minute.
    config = {"moe_timeout_s": 20.0}
    with started(
        checkpoint("minimax-m2"), tmp_path, config=config, options=(*GRAPHS, *OURS)
    ) as deployment:
        for length in (TOKENS - 1, TOKENS + 1):
            status, reply = deployment.ask(list(range(100, 100 + length)), max_tokens=4)
            assert status == 200, reply
        fatal = {"prompt": list(range(200, 200 + TOKENS)), "max_tokens": 4}
        traffic = Traffic(deployment.port, [Request(body=fatal)])
        traffic.join(NOTICED_S)
        code = deployment.footprint.note_until_exit(STOP_S)
        log = deployment.server.log.read_text(errors="replace")

        assert "moe-0" in str(traffic.outcomes[0].error)
        assert code == 1
        assert re.search(REPORT, log.rpartition("vllm serve: error: ")[2])
        # Compilers may keep files there.
        left = [found for found in deployment.footprint.left() if not found.startswith("file ")]
        assert left == []
