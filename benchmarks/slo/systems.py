"""The systems that are compared, each as a started server: what serves on the same GPUs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from e2e.server import (
    MODEL_NAME,
    START_DEADLINE_S,
    Server,
    ServerError,
    free_port,
    interrupt_on_sigterm,
    serve,
    start,
)

from vllm_expertplex.serve.placement import visible_gpus

__all__ = ["MODEL_NAME", "Running", "ServerError", "Setup", "System", "interrupt_on_sigterm"]

EXPERTPLEX = "expertplex"


class Setup(NamedTuple):
    """What all systems share. `options` go to every `vllm serve`, `plain` to vLLM's own only."""

    model: Path
    logs: Path
    gpus: int  # 0: on CPU
    max_model_len: int
    options: Sequence[str]
    plain: Sequence[str] = ()


class Running(NamedTuple):
    base_url: str
    start_s: float  # from its first process until it was seen to be healthy
    kv_tokens: int  # KV cache of all engines that decode


# Entered, a system is starting (an ExpertPlex deployment, which shares its GPUs with no other, only
# when called); called, it returns once it runs.
Starting = AbstractContextManager[Callable[[], Running]]


class System(NamedTuple):
    name: str
    begin: Callable[[Setup], Starting]

    @property
    def ours(self) -> bool:
        return self.name.startswith(EXPERTPLEX)


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
def _expertplex(
    name: str, layout: str, config: dict[str, Any], setup: Setup
) -> Iterator[Callable[[], Running]]:
    log, options = setup.logs / f"{name}.log", list(setup.options)
    if config:
        path = setup.logs / f"{name}.json"
        path.write_text(json.dumps(config))
        options += ["--expertplex-config", str(path)]
    with ExitStack() as stack:

        def ready() -> Running:
            server = stack.enter_context(serve(setup.model, log, layout=layout, options=options))
            # Prefill engines' caches only hold prompts in passing.
            prefill = int(re.match(r"\d+", layout)[0])  # type: ignore[index]
            return Running(_url(server), server.start_s, sum(sorted(_kv_tokens(log))[prefill:]))

        yield ready


@contextmanager
def _colocated(name: str, chunked: bool, how: str, setup: Setup) -> Iterator[Callable[[], Running]]:
    """One engine, or one per GPU with the experts over all, as `how` says. Under expert parallelism
    vLLM takes DeepGEMM for FP8 experts from 128 tokens a step, Triton below.
    """
    log, begun = setup.logs / f"{name}.log", time.monotonic()
    options = [*setup.options, *_parallel(how, setup.gpus), *setup.plain]
    if chunked:
        options.append("--enable-chunked-prefill")
    else:
        whole = str(setup.max_model_len)
        options += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", whole]
    with start(setup.model, log, options=options) as server:

        def ready() -> Running:
            server.wait_healthy(START_DEADLINE_S)
            return Running(_url(server), time.monotonic() - begun, sum(_kv_tokens(log)))

        yield ready


@contextmanager
def _pdd(setup: Setup) -> Iterator[Callable[[], Running]]:
    """vLLM's prefill-decode disaggregation over NIXL, half the GPUs each; a weight copy on both."""
    half, begun = max(1, setup.gpus // 2), time.monotonic()
    visible = visible_gpus(setup.gpus)
    options = [*setup.options, *_parallel("tp", half), *setup.plain]
    if setup.gpus:
        # Without expert parallelism vLLM would take Triton's kernels for prefill, too; and NIXL
        # moves each layer of each block on its own.
        options += ["--moe-backend", "deep_gemm", "--block-size", "64"]
    with ExitStack() as stack:
        servers = []
        for index, role in enumerate(("kv_producer", "kv_consumer")):
            transfer = {
                "kv_connector": "NixlConnector",
                "kv_role": role,
                "kv_buffer_device": "cuda" if setup.gpus else "cpu",
                "kv_connector_extra_config": {"num_threads": 4 if setup.gpus else 0},
            }
            gpus = visible[index * half :][:half] or visible  # a single one has both
            environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
            if setup.gpus:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
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

        def ready() -> Running:
            for server in servers:
                server.wait_healthy(START_DEADLINE_S)
            url = stack.enter_context(_proxy(_url(servers[0]), _url(servers[1])))
            kv = sum(_kv_tokens(setup.logs / "pdd-kv_consumer.log"))
            return Running(url, time.monotonic() - begun, kv)

        yield ready


@contextmanager
def _proxy(prefill_url: str, decode_url: str, deadline_s: float = 60) -> Iterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    proxy = subprocess.Popen(
        [sys.executable, "-m", "slo.pdd_proxy", str(port), prefill_url, decode_url],
        cwd=Path(__file__).parents[1],
    )
    try:
        begun = time.monotonic()
        while time.monotonic() - begun < deadline_s and proxy.poll() is None:
            try:
                if httpx.get(f"{url}/health", timeout=5, trust_env=False).is_success:
                    break
            except httpx.TransportError:
                time.sleep(0.2)
        else:
            raise ServerError(f"the PDD proxy at {url} was not healthy within {deadline_s:g} s")
        yield url
    finally:
        proxy.terminate()
        try:
            proxy.wait(10)
        except subprocess.TimeoutExpired:
            proxy.kill()  # it waits for requests that nobody will answer
            proxy.wait(10)


PLAIN: dict[str, Callable[[Setup], Starting]] = {
    **{
        f"{mode}-{how}": partial(_colocated, f"{mode}-{how}", mode == "chunked", how)
        for mode in ("chunked", "unchunked")
        for how in ("tp", "dp")
    },
    "pdd": _pdd,
}


def parse(text: str) -> System:
    """One of `PLAIN`, or `expertplex[=LAYOUT][+KEY=VALUE...]`, keys as in `--expertplex-config`.

    Raises ValueError with what is possible.
    """
    if text in PLAIN:
        return System(text, PLAIN[text])
    what, *settings = text.split("+")
    name, _, layout = what.partition("=")
    if name != EXPERTPLEX or not all("=" in s for s in settings):
        raise ValueError(
            f"system {text!r}: expected {', '.join(PLAIN)}, or expertplex=LAYOUT followed by any "
            "+KEY=VALUE of --expertplex-config, such as expertplex=1P1D1E+tbo_tokens=4096"
        )
    config = {key: _value(value) for key, _, value in (s.partition("=") for s in settings)}
    full = text if layout else text.replace(EXPERTPLEX, f"{EXPERTPLEX}=1P1D1E", 1)
    return System(full, partial(_expertplex, full, layout or "1P1D1E", config))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text  # a name
