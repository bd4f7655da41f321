"""Starts that cannot succeed or are interrupted: one clear error, within a bound, nothing left."""

import json
import shutil
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.failure.conftest import Deployment, Start
from tests.e2e.server import command

pytestmark = pytest.mark.e2e

REFUSED_S = 150.0  # vLLM's own imports and configuration come first
FAILED_S = 150.0  # servers were started
STOP_S = 45.0  # after a signal; Python alone takes seconds to take itself down
slow = pytest.mark.slow


def error_of(deployment: Deployment) -> str:
    """The one line a user is told; fails when there is none, or a traceback in its place."""
    lines = deployment.server.log.read_text().splitlines()
    errors = [line for line in lines if line.startswith("vllm serve: error: ")]
    assert len(errors) == 1, deployment.server.errors()
    assert lines.index(errors[0]) >= len(lines) - 3, "the error is buried in other output"
    return errors[0]


def assert_refused(deployment: Deployment, expected: Sequence[str], code: int) -> None:
    assert deployment.footprint.note_until_exit(REFUSED_S if code == 2 else FAILED_S) == code
    error = error_of(deployment)
    assert all(part in error for part in expected), error
    assert deployment.footprint.left() == []


@pytest.mark.parametrize(
    ("layout", "options", "expected"),
    [
        pytest.param("two", (), ["'two'", "xPyDzE", "1P1D1E"], id="layout"),
        pytest.param("1P0D1E", (), ["1P0D1E", "at least one"], id="empty-role", marks=slow),
        pytest.param(
            "1P1D1E",
            ("--pipeline-parallel-size", "2"),
            ["--pipeline-parallel-size 2", "--expertplex-layout"],
            id="pipeline-parallel",
        ),
        pytest.param(
            "1P1D1E", ("--enable-lora",), ["--enable-lora", "merged"], id="lora", marks=slow
        ),
        pytest.param(
            "1P1D1E",
            ("--kv-transfer-config", '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'),
            ["--kv-transfer-config"],
            id="kv-transfer",
            marks=slow,
        ),
        pytest.param(
            "1P1D1E",
            ("--expertplex-config", "/nonexistent.toml"),
            ["/nonexistent.toml", "readable"],
            id="config-file",
            marks=slow,
        ),
    ],
)
def test_a_wrong_option_is_refused_by_name(
    start: Start, model: Path, layout: str, options: tuple[str, ...], expected: list[str]
) -> None:
    deployment = start(model, layout=layout, options=options, healthy=False)
    assert_refused(deployment, expected, 2)


def test_more_moe_servers_than_experts_are_refused(start: Start, model: Path) -> None:
    deployment = start(model, layout="1P1D17E", healthy=False)
    assert_refused(deployment, ["16 experts", "17 MoE servers", "between 1 and 16"], 1)


@slow
def test_a_missing_checkpoint_is_named(start: Start, tmp_path: Path) -> None:
    missing = tmp_path / "no-such-model"
    deployment = start(missing, healthy=False)
    assert_refused(deployment, [str(missing), "no directory"], 2)


@slow
def test_a_busy_port_is_named(start: Start, model: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        deployment = start(model, port=port, healthy=False)
        assert_refused(deployment, [f"port {port}", "--port"], 1)


def with_config(model: Path, out: Path, config: dict[str, object]) -> Path:
    """A checkpoint of another architecture: `model` with another config.json."""
    shutil.copytree(model, out)
    (out / "config.json").write_text(json.dumps(config))
    return out


_SIZES = {
    "torch_dtype": "bfloat16",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}


@slow
def test_a_dense_model_is_refused(start: Start, model: Path, tmp_path: Path) -> None:
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **_SIZES}
    dense = with_config(model, tmp_path / "dense", config)
    deployment = start(dense, healthy=False)
    assert_refused(deployment, ["Qwen3ForCausalLM", "no routed experts"], 1)


@slow
def test_a_model_with_its_own_expert_layer_is_refused(
    start: Start, model: Path, tmp_path: Path
) -> None:
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 128,
        **_SIZES,
    }
    own = with_config(model, tmp_path / "own", config)
    deployment = start(own, healthy=False)
    assert_refused(deployment, ["GptOssForCausalLM", "not supported"], 1)


def corrupted(model: Path, out: Path) -> Path:
    """`model` with the second half of its weights missing, as after a broken download."""
    shutil.copytree(model, out)
    weights = out / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size // 2)
    return out


@slow
def test_a_checkpoint_that_cannot_be_read_fails_the_start_by_name(
    start: Start, model: Path, tmp_path: Path
) -> None:
    deployment = start(corrupted(model, tmp_path / "corrupted"), healthy=False)
    assert_refused(deployment, ["-0", "Safetensor"], 1)


@slow
def test_nothing_is_left_when_the_api_process_is_killed_during_a_failed_start(
    start: Start, model: Path, tmp_path: Path
) -> None:
    deployment = start(corrupted(model, tmp_path / "corrupted"), healthy=False)
    await_servers(deployment, "SafetensorError")

    deployment.server.process.kill()

    assert deployment.footprint.left() == []


def await_servers(deployment: Deployment, word: str | None = None) -> None:
    """Return once MoE and attention servers are processes, and the log has `word`."""
    deadline = time.monotonic() + FAILED_S
    while True:
        deployment.footprint.note()
        names = " ".join(command(process) for process in deployment.server.processes())
        started = "expertplex-moe-0" in names and names.count("EngineCore") >= 2
        if started if word is None else word in deployment.server.log.read_text():
            return
        assert deployment.server.process.poll() is None, deployment.server.errors()
        assert time.monotonic() < deadline, f"servers not started within {FAILED_S:g} s"
        time.sleep(0.02)


@slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_servers_load_ends_the_start(
    start: Start, model: Path, number: signal.Signals
) -> None:
    deployment = start(model, healthy=False)
    await_servers(deployment)

    deployment.server.process.send_signal(number)

    assert deployment.footprint.note_until_exit(STOP_S) == 130
    assert deployment.footprint.left() == []


@slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_before_servers_start_leaves_nothing(
    start: Start, model: Path, number: signal.Signals
) -> None:
    deployment = start(model, healthy=False)
    deadline = time.monotonic() + REFUSED_S
    while deployment.footprint.run_dir is None:
        deployment.footprint.note()
        assert time.monotonic() < deadline, f"no run directory within {REFUSED_S:g} s"

    deployment.server.process.send_signal(number)

    assert deployment.footprint.note_until_exit(STOP_S) in (130, -number)
    assert deployment.footprint.left() == []
