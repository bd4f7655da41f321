"""The demo around a server that misbehaves; the real thing is in `tests/e2e`."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from vllm_expertplex import cli, demo


@pytest.fixture
def model(tmp_path):
    """A folder the demo takes for a finished checkpoint."""
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def gone(pid: int, within_s: float = 0) -> bool:
    """Whether the process ends within this time (a zombie has ended)."""
    deadline = time.monotonic() + within_s
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def serve_with(monkeypatch, code: str) -> None:
    """Makes the demo start this Python program instead of vLLM."""
    monkeypatch.setattr(demo, "serve_command", lambda *args: [sys.executable, "-c", code])


def test_the_command_is_what_a_user_would_type(model):
    command = demo.serve_command(model, "2P1D3E", 8000, ["--enforce-eager"])
    assert command[1:3] == ["serve", str(model)]
    joined = " ".join(command)
    assert "--executor expertplex --expertplex-layout 2P1D3E" in joined
    assert joined.endswith("--enforce-eager")


def test_a_failed_start_shows_the_first_cause(monkeypatch, capsys, model):
    serve_with(
        monkeypatch,
        "print('(Worker pid=1) ERROR [w.py:1] ValueError: too little memory [a/b]\\n' * 2)\n"
        "raise RuntimeError('engine failed')",
    )
    assert cli.main(["demo", "--model", str(model)]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "exit code 1" in shown
    assert shown.count("ValueError: too little memory [a/b]") == 1
    assert shown.index("ValueError") < shown.index("RuntimeError: engine failed")


def test_a_server_that_is_never_ready_is_stopped(monkeypatch, capsys, model, tmp_path):
    pid_file = tmp_path / "pid"
    serve_with(
        monkeypatch,
        f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)",
    )
    assert cli.main(["demo", "--model", str(model), "--start-timeout", "2"]) == 1
    assert "not ready after 2 s (--start-timeout)" in " ".join(capsys.readouterr().out.split())
    assert gone(int(pid_file.read_text()))


def test_a_server_that_ignores_sigterm_is_killed_with_its_children(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "STOP_DEADLINE_S", 0.5)
    child_file = tmp_path / "child"
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(child_file)!r}, 'w').write(str(child.pid)); time.sleep(60)"
    )
    with demo.served([sys.executable, "-c", code], tmp_path / "log") as server:
        deadline = time.monotonic() + 20
        while not (child_file.exists() and child_file.read_text()):
            assert time.monotonic() < deadline, "the child did not start within 20 s"
            time.sleep(0.05)
    assert server.returncode == -signal.SIGKILL
    assert gone(int(child_file.read_text()), within_s=10)


def test_sigterm_to_the_demo_stops_the_server(model, tmp_path):
    pid_file = tmp_path / "pid"
    server = (
        f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    )
    code = (
        "import sys; from vllm_expertplex import cli, demo\n"
        f"demo.serve_command = lambda *args: [sys.executable, '-c', {server!r}]\n"
        f"cli.main(['demo', '--model', {str(model)!r}])"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not (pid_file.exists() and pid_file.read_text()):
        assert time.monotonic() < deadline, "the server did not start within 30 s"
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(20) == 143
    assert gone(int(pid_file.read_text()))


def test_roles_table_has_a_row_for_each_server(capsys):
    moe = {
        "role": "moe", "rank": 2, "pid": 41, "device": "cpu", "weight_bytes": 3 << 20,
        "kv_blocks": 0, "kv_blocks_used": 0, "tokens": 1234, "state": "ready",
    }  # fmt: skip
    decode = {**moe, "role": "decode", "rank": 0, "kv_blocks": 1000, "kv_blocks_used": 7}
    demo.Console(width=120).print(demo.roles_table({"layout": "1P1D3E", "servers": [moe, decode]}))
    rows = {
        line.split("│")[1].strip(): line
        for line in capsys.readouterr().out.splitlines()
        if "│" in line
    }
    assert "3.0 MiB" in rows["moe 2"]
    assert "1,234" in rows["moe 2"]
    assert "1,000 (7)" in rows["decode 0"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--layout", "nope"], "expected xPyDzE"),
        (["--layout", "0P1D1E"], "at least one server"),
        (["--port", "99999999"], "--port 99999999"),
        (["--port", "-1"], "--port -1"),
        (["--max-tokens", "0"], "--max-tokens 0"),
        (["--start-timeout", "nan"], "--start-timeout nan"),
        (["--start-timeout", "-1"], "--start-timeout -1"),
    ],
)
def test_bad_usage_is_said_before_a_model_is_made(monkeypatch, capsys, words, expected):
    monkeypatch.setattr(demo, "make_model", lambda path: pytest.fail("made a model"))
    assert cli.main(["demo", "--model", "/none", *words]) == 2
    assert expected in capsys.readouterr().err
