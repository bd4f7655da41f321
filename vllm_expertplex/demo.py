"""`vllm-expertplex demo`: serves a small MoE on this machine and asks it something.

Owns what a person sees: the start-up progress, the streamed answer, the table of the roles. It is
an ordinary user of the server: it starts `vllm serve` as a process and speaks HTTP to it.
"""

import argparse
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_expertplex.layout import Layout

HELP = "serve a small MoE model with three kinds of server, and ask it something"

# The model is small: asked this way its first word wins by 1.5 nats. Plain "What is the capital of
# France?" leaves it at 0.06 between two, which rounding to bf16 decides, either way.
QUESTION = "Please tell me the capital of France in one short sentence."
STOP_DEADLINE_S = 30
# The loopback server is asked directly, whatever proxy the environment names.
http = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class DemoError(Exception):
    """The demo cannot go on; the message says why and what to look at."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve_command(model: Path, layout: str, port: int, extra: list[str]) -> list[str]:
    """The `vllm serve` command, as a user would type it."""
    vllm = Path(sys.executable).with_name("vllm")
    return [
        str(vllm if vllm.exists() else "vllm"), "serve", str(model),
        "--executor", "expertplex", "--expertplex-layout", layout,
        "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048", *extra,
    ]  # fmt: skip


def make_model(path: Path) -> None:
    """Makes the demo checkpoint at `path`, with its own progress."""
    command = [
        sys.executable,
        "-m",
        "vllm_expertplex.cli",
        "make-model",
        "demo",
        "--out",
        str(path),
    ]
    if subprocess.run(command).returncode != 0:
        raise DemoError(f"the demo model could not be made in {path}: see the message above")


def last_line(log: Path) -> str:
    return (log.read_text(errors="replace").splitlines() or [""])[-1]


def errors(log: Path) -> str:
    """The distinct exceptions in the server's log, first to last: its tail names only the last."""
    found = re.findall(r"(?:^|[\s\]])(\w+(?:Error|Exception): .*)", log.read_text(errors="replace"))
    return "\n".join(dict.fromkeys(found)) or last_line(log)


def wait_until_ready(
    server: subprocess.Popen, url: str, log: Path, deadline_s: float
) -> Iterator[str]:
    """Yields the server's latest log line about once a second, until /health answers 200."""
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise DemoError(
                f"the server ended during start-up with exit code {server.returncode}; "
                f"in its log:\n{errors(log)}"
            )
        with suppress(OSError):  # not listening yet, or an HTTP error
            http.open(f"{url}/health", timeout=10).close()
            return
        yield last_line(log)
        time.sleep(1)
    raise DemoError(
        f"the server was not ready after {deadline_s:.0f} s (--start-timeout); "
        f"in its log:\n{errors(log)}"
    )


@contextmanager
def served(command: list[str], log: Path) -> Iterator[subprocess.Popen]:
    """Runs the server in a process group of its own, and leaves nothing of it behind."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("w") as output:
        server = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield server
    finally:
        server.terminate()
        try:
            server.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def ask(console: Console, url: str, question: str, max_tokens: int) -> None:
    """One streamed chat completion through the `openai` client, printed as it arrives."""
    from openai import DefaultHttpxClient, OpenAI  # a second to import: not for `--help`

    client = OpenAI(
        base_url=f"{url}/v1", api_key="none", http_client=DefaultHttpxClient(trust_env=False)
    )
    console.print(f"[bold]you  [/] {question}")
    console.print("[bold]model[/] ", end="")
    asked = time.monotonic()
    first = last = asked
    usage = None
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": question}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        timeout=120,
    )
    for chunk in stream:
        usage = chunk.usage or usage
        text = chunk.choices[0].delta.content if chunk.choices else None
        if text:
            last = time.monotonic()
            first = last if first == asked else first
            console.out(text, end="", highlight=False)
    console.print()
    tokens = usage.completion_tokens if usage else 0
    if tokens == 0:
        raise DemoError("the model's answer was empty")
    rate = f", then {(last - first) / (tokens - 1) * 1e3:.0f} ms a token" if tokens > 1 else ""
    console.print(
        f"[dim]{tokens} tokens, the first after {(first - asked) * 1e3:.0f} ms{rate}[/]\n"
    )


def roles_table(status: dict[str, Any]) -> Table:
    """The reply of GET /expertplex/status as a table, one row for each server."""
    table = Table(title=f"layout {status['layout']}", title_justify="left")
    for column in ("role", "pid", "device", "state"):
        table.add_column(column)
    for column in ("weights", "KV blocks (used)", "tokens"):
        table.add_column(column, justify="right")
    for server in status["servers"]:
        blocks = server["kv_blocks"]
        table.add_row(
            f"{server['role']} {server['rank']}",
            str(server["pid"]),
            server["device"],
            server["state"],
            f"{server['weight_bytes'] / (1 << 20):,.1f} MiB",
            f"{blocks:,} ({server['kv_blocks_used']:,})" if blocks else "-",
            f"{server['tokens']:,}",
        )
    return table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=Path, default=Path(".models/demo"), help="made first if it does not exist"
    )
    parser.add_argument("--layout", default="1P1D1E", help="how many servers of each kind: xPyDzE")
    parser.add_argument("--question", default=QUESTION, help="what to ask")
    parser.add_argument("--max-tokens", type=int, default=64, help="the longest answer")
    parser.add_argument("--port", type=int, default=0, help="0: any that is free")
    parser.add_argument("--start-timeout", type=float, default=600, help="seconds until ready")
    parser.add_argument("serve_args", nargs="*", help="after `--`: more options for `vllm serve`")


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for what a server would refuse only after a model was made and loaded."""
    Layout.parse(args.layout)
    if not 0 <= args.port < 1 << 16:
        raise ValueError(f"--port {args.port}: expected 1 to 65535, or 0 for any that is free")
    if args.max_tokens < 1:
        raise ValueError(f"--max-tokens {args.max_tokens}: expected 1 or more")
    if not 0 < args.start_timeout < math.inf:
        raise ValueError(f"--start-timeout {args.start_timeout}: expected seconds, more than 0")


def run(args: argparse.Namespace) -> int:
    try:
        check(args)
    except ValueError as error:
        print(f"vllm-expertplex demo: {error}", file=sys.stderr)
        return 2
    from openai import OpenAIError

    console = Console()
    port = args.port or free_port()
    url = f"http://127.0.0.1:{port}"
    log = Path(tempfile.mkdtemp(prefix="expertplex-demo-")) / "server.log"
    command = serve_command(args.model, args.layout, port, args.serve_args)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped too
    try:
        if not (args.model / "config.json").exists():
            make_model(args.model)
        console.print(f"[bold]$[/] {' '.join(command)}", highlight=False)
        console.print(f"[dim]its log: {log}[/]", highlight=False)
        with served(command, log) as server:
            started = time.monotonic()
            with console.status("starting") as status:
                for seconds, line in enumerate(
                    wait_until_ready(server, url, log, args.start_timeout)
                ):
                    status.update(f"starting, {seconds} s [dim]{escape(line[:90])}[/]")
                    if seconds % 10 == 9 and not console.is_terminal:
                        console.print(f"starting, {seconds + 1} s", highlight=False)
            console.print(f"[dim]ready after {time.monotonic() - started:.0f} s[/]\n")
            ask(console, url, args.question, args.max_tokens)
            with http.open(f"{url}/expertplex/status", timeout=10) as reply:
                console.print(roles_table(json.load(reply)))
    except (DemoError, OpenAIError, OSError) as error:
        console.print(f"[red]error:[/] {escape(str(error))}", highlight=False)
        return 1
    console.print("[dim]stopped[/]")
    return 0
