"""One deployment through a storm of cancelled requests, then losing its servers one by one.

The tests share it and run in this order: each leaves it as the next one needs it, and the last one
ends it. Layout 2P2D1E: one prefill and one decode server can go, the MoE server cannot.
"""

import os
import random
import signal
import time

import pytest

from tests.e2e.failure.conftest import Deployment
from tests.e2e.failure.traffic import Request, Traffic
from vllm_expertplex.checkpoints.tokenizer import VOCAB_SIZE

pytestmark = pytest.mark.e2e

LAYOUT = "2P2D1E"
LEASE_S = 6
CONFIG = {"kv_lease_s": LEASE_S}

RELEASE_S = 5.0  # after the last client is gone, until nothing is held
ERROR_S = 10.0  # after a server's death, until its clients have their error
STOP_S = 30.0  # after everything's loss, until the serve process has ended

HELD = (
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "expertplex:kv_blocks_used",
    "expertplex:requests",
)
EXPIRED = ("vllm:nixl_num_kv_expired_reqs_total",)
PROMPTS = ["Hello", "one two three " * 40, [7, 8, 9] * 100]


def answers(deployment: Deployment) -> list[list[int]]:
    """Greedy token ids for a few prompts, one request at a time."""
    found = []
    for prompt in PROMPTS:
        status, reply = deployment.ask(prompt, max_tokens=16, return_token_ids=True)
        assert status == 200, reply
        found.append(reply["choices"][0]["token_ids"])
    return found


def assert_nothing_held(deployment: Deployment, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while held := {k: v for k, v in deployment.metrics(*HELD).items() if v != 0}:
        assert time.monotonic() < deadline, f"still held after {within_s:g} s: {held}"
        time.sleep(0.05)
    reply = deployment.server.http.post("/reset_prefix_cache")
    assert (reply.status_code, reply.json()) == (200, {"success": True})  # False: blocks in use


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, VOCAB_SIZE) for _ in range(count)]


def storm(count: int, seed: int) -> list[Request]:
    """Random requests, every second of which is cancelled: by time, or after some output."""
    rng = random.Random(seed)
    requests = []
    for index in range(count):
        body = {
            "prompt": tokens(rng, rng.choice([1, 20, 60, 200, 512, 900, 1500])),
            "max_tokens": rng.choice([1, 2, 20, 60]),
            "temperature": 1.0,
            "ignore_eos": True,
            "n": 2 if rng.random() < 0.15 else 1,
            "stop": ["e"] if rng.random() < 0.15 else None,
            "seed": index if rng.random() < 0.3 else None,
        }
        cut_s = cut_chunks = None
        if index % 2:
            if rng.random() < 0.5:
                cut_s = rng.choice([0.001, 0.02, 0.1, 0.3, 0.6, 1, 2, 4])
            else:
                cut_chunks = rng.choice([1, 1, 2, 5])
        requests.append(
            Request(
                body=body,
                start_s=rng.random() * 4,
                cut_after_s=cut_s,
                cut_after_chunks=cut_chunks,
            )
        )
    return requests


def test_nothing_is_held_after_a_storm_of_cancelled_requests(shared: Deployment) -> None:
    before, expired = answers(shared), shared.metrics(*EXPIRED)
    requests = storm(200, seed=1)

    traffic = Traffic(shared.port, requests)
    traffic.join(150)

    assert_nothing_held(shared, RELEASE_S)
    assert shared.metrics(*EXPIRED) == expired  # freed by word of the client, not by their lease
    cut = sum(outcome.cut for outcome in traffic.outcomes)
    assert cut >= 60  # some that were to hang up had their whole answer by then
    for request, outcome in zip(requests, traffic.outcomes, strict=True):
        assert outcome.error is None
        assert outcome.cut or outcome.finished == request.body["n"], (request, outcome)
    assert answers(shared) == before


@pytest.mark.parametrize("victim", ["decode-1", "prefill-1"])
def test_a_lost_attention_server_costs_its_own_requests_only(
    shared: Deployment, victim: str
) -> None:
    before = answers(shared)
    rng = random.Random(victim)
    prefill = victim.startswith("prefill")
    body = {"max_tokens": 8 if prefill else 300, "ignore_eos": True}
    length = 1500 if prefill else 60  # so that the victim still has work when it is killed
    traffic = Traffic(
        shared.port, [Request(body={**body, "prompt": tokens(rng, length)}) for _ in range(16)]
    )
    outcomes = traffic.outcomes
    if prefill:
        traffic.wait_until(lambda: any(o.chunks for o in outcomes), 60, "a first token")
    else:
        traffic.wait_until(lambda: all(o.chunks for o in outcomes), 60, "everyone's first token")

    os.kill(shared.pid(victim), signal.SIGKILL)
    killed = time.monotonic()
    traffic.join(120)

    lost = [outcome for outcome in outcomes if outcome.error is not None]
    assert lost
    assert all(victim in str(outcome.error) for outcome in lost), lost
    assert max(outcome.ended for outcome in lost) - killed < ERROR_S
    others = [outcome for outcome in outcomes if outcome.error is None]
    assert others
    assert all(outcome.finished == 1 for outcome in others)
    assert shared.server.http.get("/health").status_code == 200
    states = {f"{s['role']}-{s['rank']}": s["state"] for s in shared.status()["servers"]}
    assert states[victim] == "lost"
    assert answers(shared) == before
    assert_nothing_held(shared, LEASE_S + RELEASE_S)  # what the victim held ends with its lease


def test_a_lost_moe_server_ends_everything_with_its_name(shared: Deployment) -> None:
    rng = random.Random(3)
    traffic = Traffic(
        shared.port,
        [
            Request(body={"prompt": tokens(rng, 60), "max_tokens": 400, "ignore_eos": True})
            for _ in range(8)
        ],
    )
    outcomes = traffic.outcomes
    traffic.wait_until(lambda: all(o.chunks for o in outcomes), 60, "everyone's first token")
    shared.footprint.note()

    os.kill(shared.pid("moe-0"), signal.SIGKILL)
    killed = time.monotonic()
    traffic.join(ERROR_S)
    code = shared.footprint.note_until_exit(STOP_S - (time.monotonic() - killed))

    assert all("moe-0" in str(outcome.error) for outcome in outcomes), outcomes
    assert code == 1
    assert "moe-0" in shared.server.log.read_text().rpartition("vllm serve: error: ")[2]
    assert shared.footprint.left() == []
