"""The frontend as a state machine: nothing lost, nothing stuck, T and the deadline kept."""

from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from vllm_expertplex.asyncep.flops import Flops
from vllm_expertplex.asyncep.frontend import Frontend, NoEngineLeft
from vllm_expertplex.client.prefixes import PrefixIndex
from vllm_expertplex.planner.model_configs import load_model

_FLOPS = Flops(load_model("qwen3-235b-a22b"))
_WAIT = 0.1


def _frontend(engines: int = 2, tokens: float = 1000, step: int = 0) -> Frontend:
    """T is what `tokens` unrelated tokens make."""
    index = PrefixIndex(range(engines), 16)
    return Frontend(range(engines), _FLOPS, index, tokens * _FLOPS.per_token, _WAIT, step)


class Requests(RuleBasedStateMachine):
    """Submits, answers, aborts and losses in any order, against a plain account of them."""

    @initialize(
        engines=st.integers(1, 3),
        tokens=st.sampled_from([0, 200, 1000]),
        step=st.sampled_from([0, 500, 2000]),
    )
    def start(self, engines: int, tokens: int, step: int) -> None:
        self.frontend = _frontend(engines, tokens, step)
        self.now = 0.0
        self.count = 0
        self.held: set[str] = set()
        self.sent: dict[str, int] = {}  # without an answer
        self.batches: dict[int, list[set[str]]] = {e: [] for e in range(engines)}
        self.alive = set(range(engines))

    def _release(self) -> None:
        for batch in self.frontend.release(self.now):
            assert batch.engine in self.alive
            assert batch.request_ids
            for request_id in batch.request_ids:
                self.held.remove(request_id)  # exactly once
                self.sent[request_id] = batch.engine
            self.batches[batch.engine].append(set(batch.request_ids))
            assert len(self._running(batch.engine)) <= 3 or not self.frontend.threshold
        if not self.frontend.threshold:
            assert self.frontend.held == 0

    def _running(self, engine: int) -> list[set[str]]:
        live = set(self.sent)
        return [batch for batch in self.batches[engine] if batch & live]

    @rule(tokens=st.integers(1, 900), prompt=st.integers(0, 2), siblings=st.integers(1, 3))
    def submit(self, tokens: int, prompt: int, siblings: int) -> None:
        self.count += 1
        keys = PrefixIndex([0], 16).keys([prompt] * tokens)
        for index in range(siblings):
            name = f"{self.count}-{index}"
            self.held.add(name)
            group = (str(self.count), siblings) if siblings > 1 else None
            self.frontend.submit(name, tokens, keys, self.now, group)
        self._release()

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.sent)))
        del self.sent[name]
        self.frontend.answered(name)
        self._release()

    @precondition(lambda self: self.sent or self.held)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted({*self.sent, *self.held})))
        was_sent = self.frontend.drop(name)
        assert was_sent == (name in self.sent)
        self.sent.pop(name, None)
        self.held.discard(name)
        self._release()

    @precondition(lambda self: len(self.alive) > 1)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        engine = data.draw(st.sampled_from(sorted(self.alive)))
        self.alive.remove(engine)
        lost = self.frontend.lose(engine, self.now)
        assert set(lost) == {name for name, where in self.sent.items() if where == engine}
        for name in lost:
            del self.sent[name]
        self._release()

    @rule(passed=st.floats(0.001, 0.3))
    def wait(self, passed: float) -> None:
        self.now += passed
        self._release()

    @invariant()
    def nothing_is_lost(self) -> None:
        if hasattr(self, "frontend"):
            assert self.frontend.held == len(self.held)

    @invariant()
    def an_idle_engine_is_woken_in_time(self) -> None:
        if not hasattr(self, "frontend"):
            return
        wake = self.frontend.wake_at(self.now)
        assert wake is None or wake <= self.now + _WAIT
        if self.held and not self.sent:
            assert wake is not None

    def teardown(self) -> None:
        if not hasattr(self, "frontend"):
            return
        for _ in range(1000):
            if not self.held and not self.sent:
                break
            self.now += _WAIT
            self._release()
            for name in list(self.sent):
                del self.sent[name]
                self.frontend.answered(name)
        assert not self.held
        assert all(load == pytest.approx(0) for load in self.frontend.backlog().values())


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def _submit(frontend: Frontend, name: str, tokens: int, now: float, prompt: int = -1) -> None:
    same = [prompt] * tokens if prompt >= 0 else [crc32(name.encode()) + i for i in range(tokens)]
    frontend.submit(name, tokens, PrefixIndex([0], 16).keys(same), now)


def test_a_lone_request_does_not_wait() -> None:
    frontend = _frontend()
    _submit(frontend, "a", 10, 0.0)
    assert [batch.request_ids for batch in frontend.release(0.0)] == [["a"]]


@given(st.integers(2, 30))
def test_a_burst_after_idle_is_two_batches(count: int) -> None:
    """The first request runs at once; all others run together behind it."""
    frontend = _frontend(engines=1, tokens=100_000)
    _submit(frontend, "0", 10, 50.0)
    first = frontend.release(50.0)
    for i in range(1, count):
        _submit(frontend, str(i), 10, 50.0 + i * 1e-4)
        assert frontend.release(50.0 + i * 1e-4) == []
    frontend.answered("0")
    # The last second's arrivals say that T will not be reached: no reason to wait any longer.
    second = frontend.release(50.01)
    assert [len(batch.request_ids) for batch in (*first, *second)] == [1, count - 1]


def test_under_load_an_idle_engine_waits_for_t_and_not_longer_than_the_deadline() -> None:
    frontend = _frontend(engines=1, tokens=100)
    for i in range(20):  # 2000 tokens in the last second: T comes every 50 ms
        _submit(frontend, f"w{i}", 100, 10.0 + i * 0.05)
        for batch in frontend.release(10.0 + i * 0.05):
            for name in batch.request_ids:
                frontend.answered(name)
    _submit(frontend, "a", 60, 11.0)
    assert frontend.release(11.0) == []
    assert frontend.wake_at(11.0) == pytest.approx(11.0 + _WAIT)
    _submit(frontend, "b", 60, 11.05)
    (batch,) = frontend.release(11.05)
    assert batch.request_ids == ["a", "b"]


def test_a_batch_ends_where_t_is_reached() -> None:
    frontend = _frontend(engines=1, tokens=250)
    _submit(frontend, "busy", 300, 0.0)
    frontend.release(0.0)
    for i in range(5):
        _submit(frontend, str(i), 100, 0.0)
    assert [batch.request_ids for batch in frontend.release(0.0)] == [["0", "1", "2"]]
    # One runs, one is ready behind it: no more is sent.
    assert frontend.release(0.0) == []


def test_an_answer_takes_its_work_off_the_backlog() -> None:
    frontend = _frontend(engines=1, tokens=100)
    for name in ("a", "b"):
        _submit(frontend, name, 60, 0.0)
    (batch,) = frontend.release(0.0)
    assert batch.request_ids == ["a", "b"]
    before = frontend.backlog()[0]
    frontend.answered("a")
    assert frontend.backlog()[0] == pytest.approx(before / 2)


def test_a_batch_takes_what_fits_the_step() -> None:
    frontend = _frontend(engines=1, tokens=250, step=450)
    for name in ("running", "planned"):
        _submit(frontend, name, 300, 0.0)
        frontend.release(0.0)
    for i in range(6):
        _submit(frontend, str(i), 100, 0.0)
    assert [batch.request_ids for batch in frontend.release(0.0)] == [["0", "1", "2", "3"]]


def test_where_nothing_is_gathered_nothing_is_held_back() -> None:
    frontend = _frontend(engines=1, tokens=0)
    for i in range(9):
        _submit(frontend, str(i), 100, 0.0)
        assert [batch.request_ids for batch in frontend.release(0.0)] == [[str(i)]]


def test_requests_follow_their_prefix() -> None:
    frontend = _frontend(engines=3, tokens=10_000)
    for i in range(3):
        _submit(frontend, f"first{i}", 160, 0.0, prompt=i)
    where = {b.request_ids[0]: b.engine for b in frontend.release(0.0)}
    assert len(set(where.values())) == 3
    for i in (2, 0, 1):
        _submit(frontend, f"again{i}", 170, 0.0, prompt=i)
        frontend.answered(f"first{i}")
    later = {b.request_ids[0]: b.engine for b in frontend.release(0.0)}
    # The index was told by promises only, which ended with the answers: ask before that.
    assert {later[f"again{i}"] == where[f"first{i}"] for i in range(3)} == {True}


def test_at_low_load_new_prefixes_spread_over_the_caches() -> None:
    index = PrefixIndex(range(2), 16)
    frontend = Frontend(range(2), _FLOPS, index, 1e12, _WAIT)
    engines = []
    for i in range(6):
        prompt = [i] * 32
        frontend.submit(str(i), 32, index.keys(prompt), float(i))
        (batch,) = frontend.release(float(i))
        engines.append(batch.engine)
        index.stored(batch.engine, [f"{i}a", f"{i}b"], None, prompt)
        frontend.answered(str(i))
    assert engines == [0, 1] * 3


@given(st.integers(2, 4), st.integers(1, 60))
def test_one_prefix_for_all_does_not_pile_up(engines: int, count: int) -> None:
    frontend = _frontend(engines=engines, tokens=100)
    for i in range(count):
        _submit(frontend, str(i), 160 + 16, 0.0, prompt=5)
    backlog = sorted(frontend.backlog().values())
    largest = _FLOPS.new(176)
    assert backlog[-1] <= max(2 * frontend.threshold, backlog[0]) + largest


def test_under_load_every_prefix_is_computed_once() -> None:
    frontend = _frontend(engines=2, tokens=100)
    for i in range(400):
        _submit(frontend, str(i), 160 + 16, 0.0, prompt=i % 8)
        frontend.release(0.0)
    once = 8 * _FLOPS.new(176) + 392 * _FLOPS.new(16, 160)
    backlog = sorted(frontend.backlog().values())
    assert sum(backlog) == pytest.approx(once)
    assert backlog[0] > 2 * frontend.threshold


def test_siblings_travel_together() -> None:
    frontend = _frontend(engines=2, tokens=1000)
    keys = PrefixIndex([0], 16).keys([1] * 64)
    for i in range(3):
        assert frontend.release(0.0) == []
        frontend.submit(f"s{i}", 64, keys, 0.0, ("g", 3))
    (batch,) = frontend.release(0.0)
    assert batch.request_ids == ["s0", "s1", "s2"]


def test_siblings_that_never_come_hold_nobody_up() -> None:
    frontend = _frontend()
    frontend.submit("s0", 64, [], 0.0, ("g", 2))
    assert frontend.wake_at(0.0) == pytest.approx(_WAIT)
    (batch,) = frontend.release(_WAIT)
    assert batch.request_ids == ["s0"]


def test_without_engines_requests_are_refused() -> None:
    frontend = _frontend(engines=1)
    frontend.lose(0, 0.0)
    with pytest.raises(NoEngineLeft):
        _submit(frontend, "a", 10, 0.0)
