"""The goodput benchmark's search, client and accounting, without vLLM's servers."""

import asyncio
import contextlib
import json
import math
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from vllm_expertplex.planner.workload import Targets

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import step_profile
from slo import client, results, search, session, systems, workload
from slo.search import Attainment, Request

TARGETS = Targets(1.0, 0.1)


def gives_way(limit: float, tried: list[float]):
    def system(rate: float) -> tuple[Attainment, int]:
        tried.append(rate)
        return Attainment(1, 1, 1.0 if rate <= limit else 0.89), 100

    return system


@given(st.floats(0.05, 240), st.floats(0.05, 200), st.floats(1.2, 3))
def test_the_search_finds_the_rate_where_a_system_gives_way(
    limit: float, start: float, step: float
) -> None:
    tried: list[float] = []
    found = search.goodput(gives_way(limit, tried), start, step=step, precision=0.05)
    assert found.goodput <= limit < found.fails <= found.goodput * 1.05
    assert sorted(tried) == [p.rate for p in found.probes]
    assert len(tried) < 30


@pytest.mark.parametrize(("answer", "expected"), [(0.0, (0.0, 0.01)), (1.0, (800.0, 1000.0))])
def test_a_search_without_an_end_stops(answer: float, expected: tuple[float, float]) -> None:
    found = search.goodput(lambda _: (Attainment(answer, answer, answer), 1), 100.0)
    least, most = expected
    if answer:
        assert least / 4 <= found.goodput <= most
        assert found.fails == math.inf
    else:
        assert found.goodput == 0
        assert least <= found.fails <= 4 * most


@given(st.integers(1, 6))
def test_a_search_tries_no_more_rates_than_allowed(most: int) -> None:
    tried: list[float] = []
    found = search.goodput(gives_way(20, tried), 7.0, most=most)
    assert len(tried) == most
    assert found.goodput == max((rate for rate in tried if rate <= 20), default=0)


def test_a_search_out_of_time_begins_no_other_rate() -> None:
    tried: list[float] = []
    assert search.goodput(gives_way(20, tried), 7.0, seconds=0).goodput == 7.0
    assert tried == [7.0]


@given(st.integers(1, 500), st.integers(0, 500), st.integers(0, 500))
def test_a_verdict_is_certain_when_no_outcome_can_change_it(
    count: int, met: int, missed: int
) -> None:
    met = min(met, count)
    missed = min(missed, count - met)
    outcomes = {(met + more) / count >= search.SHARE for more in range(count - met - missed + 1)}
    assert search.certain(met, missed, count) == (len(outcomes) == 1)


def test_failures_and_either_target_count_against_a_system() -> None:
    requests = [
        Request(True, 0.5, 0.05),
        Request(True, 2.0, 0.05),
        Request(True, 0.5, 0.2),
        Request(False, 0.1, 0.01),
        Request(True, 0.5, None),
    ]
    assert search.attainment(requests, TARGETS) == Attainment(0.6, 0.6, 0.4)
    with pytest.raises(ValueError, match="no requests"):
        search.attainment([], TARGETS)


PROMPT = workload.Prompt("a", 1, 11)  # has 1 + 10 * 0.1 s for both targets


def answered(**fields) -> SimpleNamespace:
    """What vLLM's client has of a request that went well, but for `fields`."""
    output = {"success": True, "output_tokens": 11, "ttft": 0.5, "itl": [0.5, 0.5], "error": ""}
    return SimpleNamespace(**output | fields)


def test_a_request_is_decided_when_it_ends_or_can_no_longer_meet_both_targets() -> None:
    done = client.Sent(0.0, PROMPT, answered())
    assert done.decided(0.1, TARGETS) == Request(True, 0.5, pytest.approx(0.1))
    one = client.Sent(0.0, PROMPT, answered(output_tokens=1, itl=[]))
    assert one.decided(0.1, TARGETS) == Request(True, 0.5, None)
    refused = client.Sent(0.0, PROMPT, answered(success=False, output_tokens=0))
    assert not refused.decided(0.1, TARGETS).ok
    under_way = client.Sent(0.0, PROMPT)
    assert under_way.decided(1.9, TARGETS) is None
    assert under_way.decided(2.1, TARGETS) == Request(True, math.inf, math.inf)
    cut = client.Sent(0.0, PROMPT, answered(success=False, output_tokens=0), cut=True)
    assert cut.decided(1.9, TARGETS) is None
    assert cut.decided(2.1, TARGETS) == Request(True, 0.5, math.inf)


class Server:
    """Answers `/v1/completions` with a token at once and the others `delay` seconds later."""

    def __init__(self, delay: float) -> None:
        self.delay, self.asked, self.left = delay, 0, 0

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        body = await request.json()
        response = web.StreamResponse()
        await response.prepare(request)
        usage = {"usage": {"completion_tokens": body["max_tokens"], "prompt_tokens": 1}}
        try:
            await response.write(self.event({"choices": [{"text": "a"}]}))
            await asyncio.sleep(self.delay)
            await response.write(self.event({"choices": [{"text": "b"}]}))
            await response.write(self.event(usage))
        except (asyncio.CancelledError, ConnectionError):
            self.left += 1
            raise
        return response

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    def event(self, data: dict) -> bytes:
        return f"data: {json.dumps(data)}\n\n".encode()

    @contextlib.contextmanager
    def serving(self) -> Iterator[str]:
        app = web.Application()
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_get("/health", self.health)
        loop = asyncio.new_event_loop()
        runner = web.AppRunner(app, handler_cancellation=True)
        loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        loop.run_until_complete(site.start())
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)


def test_a_rate_that_is_met_is_measured_as_vllms_client_does(tmp_path: Path) -> None:
    patient = Targets(30, 3)
    with Server(0.2).serving() as url:
        found = client.run(url, "m", [PROMPT] * 20, 100.0, patient, tmp_path / "r.json")
    assert len(found) >= 18
    assert all(r.ok and r.ttft > 0 and r.ttft + 10 * r.tpot >= 0.2 for r in found)
    assert search.attainment(found, patient) == Attainment(1, 1, 1)
    kept = json.loads((tmp_path / "r.json").read_text())
    assert kept["completed"] >= 18
    assert {len(kept[name]) for name in ("ttfts", "itls", "errors", "output_lens")} == {20}


def test_a_rate_that_cannot_be_met_is_left_early_and_its_requests_are_cancelled() -> None:
    server, prompt = Server(60), workload.Prompt("a", 1, 2)
    begun = time.monotonic()
    with server.serving() as url:
        found = client.run(url, "m", [prompt] * 100, 20.0, Targets(0.3, 0.1))
        assert time.monotonic() - begun < 4
        assert 10 < server.asked < 60
        deadline = time.monotonic() + 5
        while server.left < server.asked and time.monotonic() < deadline:
            time.sleep(0.05)
    assert server.left == server.asked
    assert search.attainment(found, Targets(0.3, 0.1)) == Attainment(1, 0, 0)


def test_nothing_is_sent_once_a_rate_is_decided(tmp_path: Path) -> None:
    server, prompt = Server(60), workload.Prompt("a", 1, 2)
    with server.serving() as url:
        client.run(url, "m", [prompt] * 400, 500.0, Targets(0.2, 0.1), tmp_path / "r.json")
    kept = json.loads((tmp_path / "r.json").read_text())
    assert kept["num_prompts"] < 400
    assert set(kept["errors"]) == {"cut: the run was decided"}


def test_idle_connections_are_dropped_before_vllm_closes_them() -> None:
    from vllm import envs

    assert session.KEEP_ALIVE_S < envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE


def test_the_front_of_two_engines_starts() -> None:
    engine = Server(0)
    with (
        engine.serving() as prefill,
        engine.serving() as decode,
        systems._proxy(prefill, decode) as url,
    ):
        assert httpx.get(f"{url}/health", trust_env=False).is_success


@pytest.fixture(scope="module")
def tokenizer():
    from vllm_expertplex.checkpoints.tokenizer import train_tokenizer

    return train_tokenizer()


def test_prompts_have_exactly_the_lengths_of_the_workload(tokenizer, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("ContextTokens,GeneratedTokens\n40,7\n900,3\n25,11\n")
    said: list[str] = []
    prompts = workload.Prompts(tokenizer, str(trace), 100, 1, said.append)
    few, many = prompts.first(3), prompts.first(30)
    assert many[:3] == few
    assert all(len(tokenizer(p.text).input_ids) == p.tokens for p in many)
    assert {p[1:] for p in many} == {(40, 7), (25, 11)}
    assert len({p.text for p in many}) == 30
    assert "exceed 100 tokens" in said[0]


def test_a_workload_that_does_not_fit_is_refused(tokenizer) -> None:
    with pytest.raises(ValueError, match=r"0% .* fit into 100 tokens"):
        workload.Prompts(tokenizer, "90/20", 100, 1)


def test_a_workload_may_name_its_first_rate_and_targets() -> None:
    assert workload.parse("4000/128", 2, TARGETS) == ("4000/128", 2, TARGETS)
    assert workload.parse("sharegpt@20", 2, TARGETS) == ("sharegpt", 20, TARGETS)
    found = workload.parse("sharegpt@20,3,0.2", 2, TARGETS)
    assert found == ("sharegpt", 20, Targets(3, 0.2))
    with pytest.raises(ValueError, match="NAME@START,TTFT,TPOT"):
        workload.parse("sharegpt@20,3", 2, TARGETS)


def test_systems_are_named_with_layout_and_configuration() -> None:
    assert systems.parse("expertplex").name == "expertplex=1P1D1E"
    found = systems.parse("expertplex=2P2D2E+tbo_tokens=64+coalescing=false+moe_scheduling=fifo")
    assert found.ours
    assert found.begin.args[1:] == (
        "2P2D2E",
        {"tbo_tokens": 64, "coalescing": False, "moe_scheduling": "fifo"},
    )
    assert not systems.parse("chunked-dp").ours
    for wrong in ("chunked", "expertplex+tbo_tokens", "pdd+x=1"):
        with pytest.raises(ValueError, match="expected chunked-tp"):
            systems.parse(wrong)


def load(
    system: str, rate: float, tpot: float = 0.05, *, both: float = 0.92, requests: int = 50
) -> results.Load:
    probes = [search.Probe(rate, Attainment(1, 0.95, both), requests)]
    ours = system.startswith("expertplex")
    return results.Load(system, ours, "a GPU", "chat", 1.0, tpot, 1000, 60.0, probes)


def test_rates_of_several_calls_are_one_search(tmp_path: Path) -> None:
    path = tmp_path / "measured.jsonl"
    for rate, both in ((4.0, 0.92), (2.0, 1.0), (8.0, 0.95), (6.0, 0.5)):
        results.append(path, load("pdd", rate, both=both))
    results.append(path, load("pdd", 4.0, both=0.98, requests=100))
    (found,) = results.read([path])
    assert isinstance(found, results.Load)
    assert [p.rate for p in found.probes] == [2.0, 4.0, 6.0, 8.0]
    assert found.probes[1].requests == 150
    assert found.probes[1].attainment.both == pytest.approx(0.96)
    assert found.fails == 6.0
    assert found.goodput == 4.0  # that 8 held, where 6 did not, is chance
    results.append(path, load("pdd", 4.0, both=0.1, requests=1000))
    (found,) = results.read([path])
    assert isinstance(found, results.Load)
    assert (found.goodput, found.fails) == (2.0, 4.0)


def test_files_of_several_calls_are_merged_into_ratios(tmp_path: Path) -> None:
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    for record in (load("chunked-tp", 3.0), load("chunked-tp", 4.0), load("pdd", 2.0)):
        results.append(first, record)
    results.append(first, load("chunked-tp", 5.0, both=0.1))
    results.append(first, load("chunked-tp", 9.0, tpot=0.2))  # another load: no peer of the others
    figures = {"prefill": 100.0, "decode, 1 requests": 2.0}
    results.append(first, results.Speed("chunked-tp", False, "a GPU", 4, figures, None))
    results.append(second, load("expertplex=1P1D1E", 6.0))
    results.append(second, load("expertplex=1P1D1E", 7.0, both=0.1))
    results.append(second, load("expertplex=1P1D1E+tbo_tokens=9", 5.0))
    step = step_profile.Breakdown(3, 10.0, {"idle": 10.0}, {})
    results.append(second, results.Speed("expertplex=1P1D1E", True, "a GPU", 4, figures, step))
    records = results.read([first, second])
    path = tmp_path / "rows.json"
    results.write(records, path)
    written = json.loads(path.read_text())
    ratios = {(r["name"], r["peer_name"]): r["ratio"] for r in written["rows"] if r["peer_name"]}
    assert written["device"] == "a GPU"
    assert ratios["chat, 1 s, 50 ms: goodput, expertplex=1P1D1E", "chunked-tp"] == 1.5
    assert ratios["chat, 1 s, 50 ms: goodput, expertplex=1P1D1E, at most", "pdd"] == 3.0
    cut = "chat, 1 s, 50 ms: goodput, expertplex=1P1D1E+tbo_tokens=9, at least"
    assert ratios[cut, "chunked-tp"] == 1.25
    assert ratios["expertplex=1P1D1E: prefill, per layer", "chunked-tp"] == 1.0
    results.plot(records, tmp_path)
    assert (tmp_path / "goodput_chat-1-s-50-ms.png").stat().st_size > 1000
