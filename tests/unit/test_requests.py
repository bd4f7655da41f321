"""The table of requests against simulated engines, in every order of events.

The simulation knows what vLLM's engines do with what they are sent: answers travel while aborts
come the other way, engines die with messages in their mailboxes, and a prefill server keeps the KV
of each answer pinned until a decode server fetches it or gives notice.
"""

from collections import deque
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine import FinishReason as Reason
from vllm.v1.metrics.stats import PrefillStats

from vllm_expertplex.client.prefixes import PrefixIndex
from vllm_expertplex.client.requests import Abort, Action, RequestTable, Send
from vllm_expertplex.client.router import NoServerLeft
from vllm_expertplex.executor.scheduler_keys import FIRST_TOKEN
from vllm_expertplex.layout import Layout

MAX_MODEL_LEN = 16


def request(
    name: str,
    prompt: int | list[int] = 4,
    max_tokens: int = 3,
    *,
    media: bool = False,
    **params: Any,
) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=list(range(prompt)) if isinstance(prompt, int) else prompt,
        mm_features=[object()] if media else None,  # type: ignore[list-item]
        sampling_params=SamplingParams(max_tokens=max_tokens, **params),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def kv_of(sent: EngineCoreRequest) -> dict[str, Any] | None:
    assert sent.sampling_params is not None
    return (sent.sampling_params.extra_args or {}).get("kv_transfer_params")


class Engine:
    """An engine's mailbox, its work, and its outputs on the wire to the client."""

    def __init__(self) -> None:
        self.alive = True
        self.inbox: deque[Action] = deque()
        self.work: dict[str, EngineCoreRequest] = {}
        self.wire: deque[EngineCoreOutput | list[str] | None] = deque()  # a list: confirmed aborts

    def receive(self) -> None:
        action = self.inbox.popleft()
        if isinstance(action, Abort):
            for name in action.request_ids:
                self.work.pop(name, None)
            if action.confirm:
                self.wire.append(action.request_ids)
        elif action.request.abort_immediately:
            self.notice(action.request)
        else:
            assert action.request.request_id not in self.work, "the same request twice"
            self.work[action.request.request_id] = action.request

    def notice(self, sent: EngineCoreRequest) -> None:
        raise AssertionError("only decode servers release a prefill's KV")

    def die(self) -> None:
        self.alive = False
        self.inbox.clear()
        self.work.clear()
        self.wire.append(None)


class Prefill(Engine):
    def __init__(self) -> None:
        super().__init__()
        self.pinned: set[str] = set()  # finished requests whose KV waits for a decode server

    def step(self, index: int, reason: Reason, dropped: int) -> None:
        name, sent = next(iter(self.work.items()))
        del self.work[name]
        params, kv = sent.sampling_params, kv_of(sent)
        assert params is not None
        assert params.max_tokens == 1
        assert params.min_tokens <= 1
        answer = None
        if kv is not None and reason in (Reason.LENGTH, Reason.STOP):
            assert kv["do_remote_decode"]
            self.pinned.add(name)
            answer = {
                "do_remote_prefill": True,
                "remote_request_id": name,
                "prefill": index,
                "remote_num_tokens": len(sent.prompt_token_ids or ()) - dropped,
            }
        tokens = [] if reason is Reason.ERROR else [0]
        self.wire.append(
            EngineCoreOutput(name, tokens, finish_reason=reason, kv_transfer_params=answer)
        )

    def die(self) -> None:
        super().die()
        self.pinned.clear()


class Decode(Engine):
    def __init__(self, prefills: dict[int, Prefill]) -> None:
        super().__init__()
        self._prefills = prefills
        self._fetched: dict[str, int] = {}  # request -> output tokens so far

    def notice(self, sent: EngineCoreRequest) -> None:
        self._take(kv_of(sent))

    def _take(self, kv: dict[str, Any] | None) -> bool:
        """Fetch or release a prefill's KV; False where that server is gone."""
        assert kv is not None
        assert kv["do_remote_prefill"]
        prefill = self._prefills[kv["prefill"]]
        if prefill.alive:
            prefill.pinned.remove(kv["remote_request_id"])  # KeyError: not there, or twice
        return prefill.alive

    def receive(self) -> None:
        action = self.inbox[0]
        if isinstance(action, Abort):
            for name in action.request_ids:
                if name in self.work and name not in self._fetched:
                    self._take(kv_of(self.work[name]))  # vLLM gives notice itself
        super().receive()

    def step(self, stop: bool) -> None:
        name, sent = next(iter(self.work.items()))
        kv, params = kv_of(sent), sent.sampling_params
        assert kv is not None
        assert params is not None
        assert params.max_tokens is not None
        assert kv["remote_request_id"] == name
        del self.work[name]
        if name not in self._fetched:
            if not self._take(kv):
                self.wire.append(EngineCoreOutput(name, [], finish_reason=Reason.ERROR))
                return
            first = kv.get(FIRST_TOKEN)
            # With prompt tokens left to compute, a first token would come before them.
            whole = kv["remote_num_tokens"] == len(sent.prompt_token_ids or ())
            assert first == (0 if whole and not sent.mm_features else None)
            self._fetched[name] = 0 if first is None else 1
        token = self._fetched[name]
        self._fetched[name] += 1
        last = token + 1 == params.max_tokens
        reason = Reason.LENGTH if last else Reason.STOP if stop else None
        self.wire.append(EngineCoreOutput(name, [token], finish_reason=reason))
        if reason is None:
            self.work[name] = sent

    def die(self) -> None:
        # What only this server knew of expires with its lease.
        held = [a.request for a in self.inbox if isinstance(a, Send)] + [
            sent for name, sent in self.work.items() if name not in self._fetched
        ]
        for sent in held:
            self._take(kv_of(sent))
        super().die()


class Lives(RuleBasedStateMachine):
    """Requests through a 2P2D deployment whose engines answer, lag and die at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.prefixes = PrefixIndex(range(4), 2)
        self.table = RequestTable(Layout.parse("2P2D1E"), MAX_MODEL_LEN, self.prefixes)
        self.prefills = {0: Prefill(), 1: Prefill()}
        self.decodes = {2: Decode(self.prefills), 3: Decode(self.prefills)}
        self.engines: dict[int, Engine] = {**self.prefills, **self.decodes}
        self.known = set(self.engines)  # not yet known to be lost
        self.requests: dict[str, EngineCoreRequest] = {}
        self.shown: dict[str, list[int]] = {}
        self.ended: dict[str, Reason | None] = {}  # None: the client went away

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            engine = self.engines[action.engine]
            if action.engine in self.known and engine.alive:
                engine.inbox.append(action)
            elif isinstance(action, Send) and action.engine in self.decodes:
                # The release or the request dies with its server; prefill's lease frees the KV.
                kv = kv_of(action.request)
                assert kv is not None
                self.prefills[kv["prefill"]].pinned.discard(kv["remote_request_id"])

    def show(self, output: EngineCoreOutput) -> None:
        name = output.request_id
        assert name not in self.ended, "an output after the end"
        assert output.kv_transfer_params is None
        self.shown[name] += output.new_token_ids
        if output.finish_reason is not None:
            self.ended[name] = output.finish_reason

    def read(self, index: int) -> None:
        """One turn of AsyncLLM's output loop."""
        self.do(self.table.hand_off())
        item = self.engines[index].wire.popleft()
        if item is None:
            self.known.remove(index)
            for output in self.table.lose(index):
                self.show(output)
        elif isinstance(item, list):
            self.table.forget(item)
        else:
            visible, actions = self.table.output(index, item)
            if visible is not None:
                self.show(visible)
            self.do(actions)

    def abort(self, name: str) -> None:
        self.ended.setdefault(name, None)
        self.do(self.table.abort([name]))

    # -- events --------------------------------------------------------------------------------

    @rule(
        prompt=st.sampled_from([1, 4, MAX_MODEL_LEN - 2, MAX_MODEL_LEN - 1]),
        max_tokens=st.integers(1, 3),
        media=st.booleans(),
    )
    def submit(self, prompt: int, max_tokens: int, media: bool) -> None:
        name = f"r{len(self.requests)}"
        self.requests[name] = request(name, prompt, max_tokens, media=media, min_tokens=max_tokens)
        self.shown[name] = []
        self.do(self.table.add(self.requests[name]))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def go_away(self, data: st.DataObject) -> None:
        alive = sorted(self.requests.keys() - self.ended.keys())
        self.abort(data.draw(st.sampled_from(alive or sorted(self.requests))))

    def busy(self, what: str) -> list[int]:
        return [index for index, engine in self.engines.items() if getattr(engine, what)]

    @precondition(lambda self: self.busy("inbox"))
    @rule(data=st.data())
    def receive(self, data: st.DataObject) -> None:
        self.engines[data.draw(st.sampled_from(self.busy("inbox")))].receive()

    @precondition(lambda self: self.busy("work"))
    @rule(
        data=st.data(),
        reason=st.sampled_from([Reason.LENGTH] * 5 + [Reason.STOP, Reason.ERROR, Reason.ABORT]),
        dropped=st.sampled_from([0, 0, 1]),
    )
    def work(self, data: st.DataObject, reason: Reason, dropped: int) -> None:
        index = data.draw(st.sampled_from(self.busy("work")))
        if index in self.prefills:
            self.prefills[index].step(index, reason, dropped)
        else:
            self.decodes[index].step(reason is Reason.STOP)

    @precondition(lambda self: self.busy("wire"))
    @rule(data=st.data(), stop_string=st.sampled_from([False, False, True]))
    def read_output(self, data: st.DataObject, stop_string: bool) -> None:
        index = data.draw(st.sampled_from(self.busy("wire")))
        item = self.engines[index].wire[0]
        self.read(index)
        # AsyncLLM looks at what it was shown before it asks for more, and may find the end in it.
        if stop_string and isinstance(item, EngineCoreOutput) and item.request_id not in self.ended:
            self.abort(item.request_id)

    @rule(index=st.integers(0, 3), luck=st.integers(0, 5))
    def die(self, index: int, luck: int) -> None:
        role = self.prefills if index in self.prefills else self.decodes
        if luck == 5 and all(engine.alive for engine in role.values()):
            self.engines[index].die()

    # -- what must hold ------------------------------------------------------------------------

    @invariant()
    def loads_are_those_of_requests_alive(self) -> None:
        for router in self.table.routers.values():
            assert min(router.load.values()) >= 0
        assert sum(self.table.count().values()) == len(self.table)

    def teardown(self) -> None:
        """Let everything that is under way arrive; then nothing may be held anywhere."""
        while any(e.inbox or e.work or e.wire for e in self.engines.values()):
            for index, engine in self.engines.items():
                while engine.inbox:
                    engine.receive()
                if engine.work and index in self.prefills:
                    self.prefills[index].step(index, Reason.LENGTH, 0)
                elif engine.work:
                    self.decodes[index].step(False)
                while engine.wire:
                    self.read(index)
            self.do(self.table.hand_off())
        assert self.ended.keys() == self.requests.keys(), "every request ends"
        for name, reason in self.ended.items():
            tokens, params = self.shown[name], self.requests[name].sampling_params
            assert params is not None
            assert tokens == list(range(len(tokens))), "tokens in order, none twice, none missing"
            if reason is Reason.LENGTH:
                full = len(self.requests[name].prompt_token_ids or ()) + 1 >= MAX_MODEL_LEN
                assert len(tokens) == (1 if full else params.max_tokens)
        assert len(self.table) == 0
        assert all(not any(r.load.values()) for r in self.table.routers.values())
        assert not any(prefill.pinned for prefill in self.prefills.values()), "KV is held"
        # What was promised has been computed, and nothing was reported.
        for server in self.table.routers["prefill"].servers:
            prompts = [r.prompt_token_ids or () for r in self.requests.values()]
            assert not any(self.prefixes.cached(server, self.prefixes.keys(p)) for p in prompts)


TestLives = Lives.TestCase
TestLives.settings = settings(
    max_examples=120,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


# -- what the two servers of a request see -----------------------------------------------------


def table(layout: str = "1P1D1E") -> RequestTable:
    return RequestTable(Layout.parse(layout), MAX_MODEL_LEN)


def test_a_prompt_goes_where_its_prefix_is_unless_that_server_is_busy() -> None:
    index = PrefixIndex(range(3), 2)
    requests = RequestTable(Layout.parse("2P1D1E"), 64, index)

    def engine(name: str, prompt: list[int]) -> int:
        (action,) = requests.add(request(name, prompt))
        return action.engine

    shared = list(range(20))
    index.stored(1, list(range(10)), None, shared)  # both halves of turns: 1 has it, 0 is next
    assert engine("a", [*shared, 50]) == 1
    assert engine("b", [60] * 20) == 0
    assert engine("c", [*shared, 51]) == 1
    assert requests.routers["prefill"].load == {0: 20, 1: 2}
    assert engine("d", [*shared[:6], *[70] * 40]) == 1  # 2 + 40 there, 20 + 46 elsewhere
    assert engine("e", [*shared[:2], *[80] * 10]) == 0  # busy by now
    requests.lose(1)
    assert engine("f", [*shared, 52]) == 0


def test_a_prompt_computes_its_last_token_in_any_case() -> None:
    index = PrefixIndex(range(2), 2)
    requests = RequestTable(Layout.parse("2P1D1E"), 64, index)
    index.stored(0, [1, 2], None, [1, 2, 3, 4])
    requests.add(request("a", [1, 2, 3, 4]))
    assert requests.routers["prefill"].load == {0: 1, 1: 0}


def answer(name: str, **fields: Any) -> EngineCoreOutput:
    kv = {"do_remote_prefill": True, "remote_request_id": name, "remote_num_tokens": 4}
    return EngineCoreOutput(name, [7], finish_reason=Reason.LENGTH, kv_transfer_params=kv, **fields)


def sent(actions: list[Action]) -> EngineCoreRequest:
    (action,) = actions
    assert isinstance(action, Send)
    return action.request


def test_prefill_and_decode_get_their_halves_of_the_parameters() -> None:
    requests = table()
    user = request("a", max_tokens=9, min_tokens=5, prompt_logprobs=3, seed=1)
    prefill = sent(requests.add(user))
    assert prefill.sampling_params is not None
    assert (prefill.sampling_params.max_tokens, prefill.sampling_params.min_tokens) == (1, 1)
    assert prefill.sampling_params.prompt_logprobs == 3
    visible, actions = requests.output(0, answer("a"))
    assert visible is not None
    assert visible.new_token_ids == [7]
    assert visible.finish_reason is None
    assert not actions
    decode = sent(requests.hand_off())
    assert decode.sampling_params is not None
    assert (decode.sampling_params.max_tokens, decode.sampling_params.min_tokens) == (9, 5)
    assert decode.sampling_params.prompt_logprobs is None
    assert decode.sampling_params.skip_reading_prefix_cache is False
    assert decode.sampling_params.seed == 1
    kv = kv_of(decode)
    assert kv is not None
    assert kv[FIRST_TOKEN] == 7
    # The user's own request is as it was.
    assert user.sampling_params is not None
    assert user.sampling_params.max_tokens == 9
    assert user.sampling_params.extra_args is None


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_a_users_kv_parameters_reach_no_engine(max_tokens: int) -> None:
    hostile = {"kv_transfer_params": {FIRST_TOKEN: 3, "do_remote_prefill": True}, "other": 1}
    requests = table()
    prefill = sent(requests.add(request("a", max_tokens=max_tokens, extra_args=hostile)))
    kv = kv_of(prefill) or {}
    assert FIRST_TOKEN not in kv
    assert not kv.get("do_remote_prefill")
    assert prefill.sampling_params is not None
    assert prefill.sampling_params.extra_args is not None
    assert prefill.sampling_params.extra_args["other"] == 1


def test_one_token_needs_no_transfer() -> None:
    requests = table()
    assert kv_of(sent(requests.add(request("a", max_tokens=1)))) is None
    visible, actions = requests.output(0, EngineCoreOutput("a", [7], finish_reason=Reason.LENGTH))
    assert visible is not None
    assert visible.finish_reason is Reason.LENGTH
    assert not actions
    assert len(requests) == 0


def test_an_id_in_use_is_refused_and_may_be_used_again_later() -> None:
    requests = table()
    requests.add(request("a"))
    with pytest.raises(ValueError, match="'a' is still in use"):
        requests.add(request("a"))
    assert sum(requests.routers["prefill"].load.values()) == 4
    requests.abort(["a"])
    requests.forget(["a"])
    requests.add(request("a"))


def test_late_word_of_an_abort_does_not_touch_the_next_request_of_that_id() -> None:
    requests = table()
    requests.add(request("a"))
    requests.abort(["a"])
    requests.output(0, answer("a"))  # the answer was on its way, before the word that it is aborted
    requests.add(request("a"))
    requests.forget(["a"])
    assert requests.count()["prefill"] == 1


def test_statistics_come_from_the_server_that_shows_the_first_token() -> None:
    def statistics() -> dict[str, Any]:
        events = [EngineCoreEvent.new_event(EngineCoreEventType.QUEUED)]
        return {"prefill_stats": PrefillStats(), "events": events}

    for media in (False, True):
        requests = table()
        requests.add(request("a", media=media))
        shown_by_prefill, _ = requests.output(0, answer("a", **statistics()))
        requests.hand_off()
        output = EngineCoreOutput("a", [8], **statistics())
        shown_by_decode, _ = requests.output(1, output)
        assert shown_by_decode is not None
        assert (shown_by_prefill is None) == media
        assert (shown_by_decode.events is not None) == media
        assert (shown_by_decode.prefill_stats is not None) == media


def test_preemption_on_decode_is_reported() -> None:
    requests = table()
    requests.add(request("a"))
    requests.output(0, answer("a"))
    requests.hand_off()
    kinds = (EngineCoreEventType.QUEUED, EngineCoreEventType.PREEMPTED)
    events = [EngineCoreEvent.new_event(kind) for kind in kinds]
    shown, _ = requests.output(1, EngineCoreOutput("a", [8], events=events))
    assert shown is not None
    assert [event.type for event in shown.events or ()] == [EngineCoreEventType.PREEMPTED]


def test_losing_the_last_server_of_a_role_is_the_end() -> None:
    for engine, role in ((0, "prefill"), (1, "decode")):
        requests = table()
        with pytest.raises(NoServerLeft, match=f"no {role} server is left"):
            requests.lose(engine)


def test_a_failed_request_says_which_server_cost_it() -> None:
    requests = table("2P2D1E")
    for name in ("0_cmpl-a-0", "cmpl-b", "cmpl-c", "cmpl-d"):
        requests.add(request(name))  # prefill-0 and prefill-1 in turn
    requests.lose(1)
    for name in ("0_cmpl-a-0", "cmpl-c"):
        requests.output(0, answer(name))
    requests.hand_off()  # to decode-0 and decode-1
    requests.output(2, EngineCoreOutput("0_cmpl-a-0", [], finish_reason=Reason.ERROR))
    requests.lose(3)

    assert requests.failures.reason("cmpl-a") == "its KV cache could not be fetched from prefill-0"
    assert requests.failures.reason("cmpl-b") == "prefill-1 is gone"
    assert requests.failures.reason("cmpl-c") == "decode-1 is gone"
    assert requests.failures.reason("cmpl-e") is None
