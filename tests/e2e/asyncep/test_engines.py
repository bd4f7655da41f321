"""Where requests go, in which batches, and what the loss of an engine costs."""

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from ..server import Server
from .conftest import Start

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def _ask(server: Server, prompt: list[int], **body: Any) -> tuple[int, str]:
    reply = server.post(
        "/v1/completions", {"prompt": prompt, "max_tokens": 1, "temperature": 0, **body}
    )
    return reply.status_code, reply.text


def _engines(server: Server) -> list[dict[str, Any]]:
    return server.http.get("/expertplex/status").json()["servers"]


def _prompt(prefix: int, tail: int) -> list[int]:
    return [prefix, *range(300, 555), 1000 + tail]


def test_requests_go_where_their_prefix_is(start: Start) -> None:
    with start(gpus=2) as server:
        for prefix in range(4):  # one after the other: nothing but the prefix to go by
            assert _ask(server, _prompt(prefix, 0))[0] == 200
        before = _engines(server)
        for prefix in (2, 0, 3, 1):
            assert _ask(server, _prompt(prefix, 1))[0] == 200
        after = _engines(server)
        assert server.post("/reset_prefix_cache", {}).status_code in (200, 404)
    new = sum(e["tokens"] for e in after) - sum(e["tokens"] for e in before)
    cached = sum(e["cached_tokens"] for e in after) - sum(e["cached_tokens"] for e in before)
    assert new == 4 * 257
    assert cached == 4 * 256  # all but the last block, whichever engine had it
    assert sum(e["prefix_blocks"] for e in after) == 4 * 8


def test_a_burst_is_few_batches_and_one_prefix_does_not_pile_up(start: Start) -> None:
    with start(gpus=2) as server:
        assert _ask(server, _prompt(0, 0))[0] == 200
        before = server.http.get("/expertplex/status").json()["batches"]
        with ThreadPoolExecutor(24) as pool:
            answers = list(pool.map(lambda i: _ask(server, _prompt(0, i)), range(24)))
        status = server.http.get("/expertplex/status").json()
    assert {code for code, _ in answers} == {200}
    assert status["batches"] - before < 24
    assert status["held"] == 0
    assert all(engine["backlog_flops"] == 0 for engine in status["servers"])


def test_an_engine_killed_mid_batch_costs_only_its_requests(start: Start) -> None:
    with start(gpus=2) as server:
        victim = next(e for e in _engines(server) if e["rank"] == 1)
        answers: list[tuple[int, str]] = []

        def ask(index: int) -> None:
            answers.append(_ask(server, [index, *range(100, 1599)]))

        threads = [threading.Thread(target=ask, args=(index,)) for index in range(24)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 60
        while _engines(server)[1]["backlog_flops"] == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        psutil.Process(victim["pid"]).send_signal(signal.SIGKILL)
        for thread in threads:
            thread.join(120)
        assert len(answers) == 24  # nobody is left waiting
        failed = [text for code, text in answers if code != 200]
        assert failed, "the engine was killed after its work"
        assert all("asyncep-1 is gone; send it again" in text for text in failed)
        assert len(failed) < 24
        # Its shard is in shared memory: the other engine goes on with all experts.
        assert all(_ask(server, [index, 5, 6])[0] == 200 for index in range(6))
        assert server.http.get("/health").status_code == 200
        states = {e["rank"]: e["state"] for e in _engines(server)}
        assert states == {0: "ready", 1: "lost"}
