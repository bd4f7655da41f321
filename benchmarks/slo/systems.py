"""The systems that are compared, each as a started server: what serves on the same GPUs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from e2e.server import (
    MODEL_NAME,
    START_DEADLINE_S,
    Server,
    free_port,
    interrupt_on_sigterm,
    serve,
    start,
)

__all__ = ["MODEL_NAME", "SYSTEMS", "Running", "Setup", "interrupt_on_sigterm"]


class Setup(NamedTuple):
    """What all systems share. `options` go to every `vllm serve`, `plain` to vLLM's own only."""

    model: Path
    logs: Path
    gpus: int  # 0: on CPU
    layout: str
    colocated: str  # `tp` or `dp` over all GPUs
    max_model_len: int
    options: Sequence[str]
    plain: Sequence[str] = ()


class Running(NamedTuple):
    base_url: str
    start_s: float
    kv_tokens: int  # KV cache of all engines that decode


def _parallel(how: str, gpus: int) -> tuple[str, ...]:
    if gpus < 2:
        return ()
    name = {"tp": "tensor", "dp": "data"}[how]
    return (f"--{name}-parallel-size", str(gpus), "--enable-expert-parallel")


def _kv_tokens(log: Path) -> list[int]:
    found = re.findall(r"KV cache size: ([\d,]+) tokens", log.read_text(errors="replace"))
    return [int(text.replace(",", "")) for text in found]


def _url(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}"


@contextmanager
def expertplex(setup: Setup) -> Iterator[Running]:
    log = setup.logs / "expertplex.log"
    with serve(setup.model, log, layout=setup.layout, options=setup.options) as server:
        # Prefill engines' caches only hold prompts in passing.
        prefill = int(re.match(r"\d+", setup.layout)[0])  # type: ignore[index]
        yield Running(_url(server), server.start_s, sum(sorted(_kv_tokens(log))[prefill:]))


@contextmanager
def _colocated(setup: Setup, name: str, options: Sequence[str]) -> Iterator[Running]:
    log = setup.logs / f"{name}.log"
    parallel = _parallel(setup.colocated, setup.gpus)
    given = (*setup.options, *parallel, *options, *setup.plain)
    with serve(setup.model, log, options=given) as server:
        yield Running(_url(server), server.start_s, sum(_kv_tokens(log)))


def chunked(setup: Setup) -> AbstractContextManager[Running]:
    return _colocated(setup, "chunked", ("--enable-chunked-prefill",))


def unchunked(setup: Setup) -> AbstractContextManager[Running]:
    whole = ("--max-num-batched-tokens", str(setup.max_model_len))
    return _colocated(setup, "unchunked", ("--no-enable-chunked-prefill", *whole))


@contextmanager
def pdd(setup: Setup) -> Iterator[Running]:
    """vLLM's prefill-decode disaggregation over NIXL, half the GPUs each; a weight copy on both."""
    half = max(1, setup.gpus // 2)
    options = (*setup.options, *_parallel(setup.colocated, half), *setup.plain)
    with ExitStack() as stack:
        servers = []
        for index, role in enumerate(("kv_producer", "kv_consumer")):
            transfer = {
                "kv_connector": "NixlConnector",
                "kv_role": role,
                "kv_buffer_device": "cuda" if setup.gpus else "cpu",
                "kv_connector_extra_config": {"num_threads": 4 if setup.gpus else 0},
            }
            gpus = range(index * half, (index + 1) * half)
            environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
            if setup.gpus:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
            servers.append(
                stack.enter_context(
                    start(
                        setup.model,
                        setup.logs / f"pdd-{role}.log",
                        options=(*options, "--kv-transfer-config", json.dumps(transfer)),
                        environment=environment,
                    )
                )
            )
        for server in servers:
            server.wait_healthy(START_DEADLINE_S)
        port = free_port()
        proxy = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("pdd_proxy.py")), str(port)]
            + [_url(server) for server in servers],
            env=os.environ.copy(),
        )
        stack.callback(proxy.wait)
        stack.callback(proxy.terminate)
        _await_proxy(proxy, f"http://127.0.0.1:{port}")
        kv = sum(_kv_tokens(setup.logs / "pdd-kv_consumer.log"))
        start_s = max(server.start_s for server in servers)
        yield Running(f"http://127.0.0.1:{port}", start_s, kv)


def _await_proxy(proxy: subprocess.Popen[bytes], url: str, deadline_s: float = 60) -> None:
    begun = time.monotonic()
    while time.monotonic() - begun < deadline_s and proxy.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5, trust_env=False).is_success:
                return
        except httpx.TransportError:
            time.sleep(0.2)
    raise RuntimeError(f"the PDD proxy at {url} was not healthy within {deadline_s:g} s")


SYSTEMS: dict[str, Callable[[Setup], AbstractContextManager[Running]]] = {
    "expertplex": expertplex,
    "chunked": chunked,
    "unchunked": unchunked,
    "pdd": pdd,
}
