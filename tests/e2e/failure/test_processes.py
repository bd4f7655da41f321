"""Processes of a running deployment killed, frozen, or told to stop; a deployment per test."""

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.failure.conftest import Deployment, Start
from tests.e2e.failure.traffic import Request, Traffic

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ERROR_S = 10.0  # after a death, until every client has its error
STOP_S = 30.0  # after a signal or a loss, until the serve process has ended
HEARTBEAT_TIMEOUT_S = 3.0
MOE_TIMEOUT_S = 5.0  # after which an attention server gives up; later than the heartbeat's


def stream(deployment: Deployment, count: int = 6) -> Traffic:
    """Clients who all have their first token, and many more to come."""
    rng = random.Random(5)
    body = {"max_tokens": 1900, "ignore_eos": True}
    traffic = Traffic(
        deployment.port,
        [
            Request(body={**body, "prompt": [rng.randrange(10, 500) for _ in range(40)]})
            for _ in range(count)
        ],
    )
    outcomes = traffic.outcomes
    traffic.wait_until(lambda: all(o.chunks for o in outcomes), 60, "everyone's first token")
    deployment.footprint.note()
    return traffic


def assert_unhealthy(deployment: Deployment) -> None:
    with suppress(httpx.TransportError):  # it may not even listen any more
        assert deployment.server.http.get("/health", timeout=5).status_code == 503


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_losing_the_last_server_of_a_role_ends_everything_with_its_name(
    start: Start, model: Path, victim: str
) -> None:
    deployment = start(model)
    traffic = stream(deployment)

    os.kill(deployment.pid(victim), signal.SIGKILL)
    killed = time.monotonic()
    traffic.join(ERROR_S)
    assert_unhealthy(deployment)
    code = deployment.footprint.note_until_exit(STOP_S - (time.monotonic() - killed))

    assert all(victim in str(outcome.error) for outcome in traffic.outcomes), traffic.outcomes
    assert code == 1
    assert victim in deployment.server.log.read_text().rpartition("vllm serve: error: ")[2]
    assert deployment.footprint.left() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_is_lost_with_any_of_its_ranks(
    start: Start, model: Path, number: signal.Signals
) -> None:
    config = {"heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S, "moe_timeout_s": MOE_TIMEOUT_S}
    deployment = start(model, config=config, options=("--tensor-parallel-size", "2"))
    traffic = stream(deployment)

    engine = psutil.Process(deployment.pid("decode-0")).parent()
    assert engine is not None
    _, second = sorted(engine.children(), key=lambda rank: rank.cmdline())
    second.send_signal(number)
    patience_s = HEARTBEAT_TIMEOUT_S + MOE_TIMEOUT_S if number == signal.SIGSTOP else 0
    traffic.join(patience_s + ERROR_S)
    assert_unhealthy(deployment)
    code = deployment.footprint.note_until_exit(STOP_S)

    assert all("decode-0" in str(outcome.error) for outcome in traffic.outcomes), traffic.outcomes
    assert code == 1
    assert deployment.footprint.left() == []


@pytest.mark.parametrize("victim", ["moe-1", "prefill-0", "decode-0"])
def test_a_frozen_server_is_noticed_by_its_heartbeat_and_named(
    start: Start, model: Path, victim: str
) -> None:
    config = {"heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S, "moe_timeout_s": MOE_TIMEOUT_S}
    deployment = start(model, layout="1P1D2E", config=config)
    traffic = stream(deployment)

    os.kill(deployment.pid(victim), signal.SIGSTOP)
    frozen = time.monotonic()
    traffic.join(2 * (HEARTBEAT_TIMEOUT_S + MOE_TIMEOUT_S) + ERROR_S)
    assert_unhealthy(deployment)
    code = deployment.footprint.note_until_exit(STOP_S)

    assert all(victim in str(outcome.error) for outcome in traffic.outcomes), traffic.outcomes
    # Not before the time that was allowed.
    assert min(outcome.ended for outcome in traffic.outcomes) - frozen > HEARTBEAT_TIMEOUT_S / 2
    assert code == 1
    assert deployment.footprint.left() == []


def test_an_idle_deployment_notices_a_dead_moe_server(start: Start, model: Path) -> None:
    deployment = start(model)

    os.kill(deployment.pid("moe-0"), signal.SIGKILL)
    time.sleep(1)

    assert_unhealthy(deployment)
    assert deployment.footprint.note_until_exit(STOP_S) == 1
    assert deployment.footprint.left() == []


def test_nothing_is_left_when_the_api_process_is_killed(start: Start, model: Path) -> None:
    deployment = start(model)
    traffic = stream(deployment)

    deployment.server.process.kill()
    traffic.join(ERROR_S)

    assert all("connection" in str(outcome.error) for outcome in traffic.outcomes)
    assert deployment.footprint.left() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_busy_deployment_in_order(
    start: Start, model: Path, number: signal.Signals
) -> None:
    deployment = start(model)
    stream(deployment)

    deployment.server.process.send_signal(number)

    assert deployment.footprint.note_until_exit(STOP_S) == 0
    assert deployment.footprint.left() == []
