"""The table of requests against simulated engines, in every order of events.

The simulation knows what vLLM's engines do with what they are sent: answers travel while aborts
come the other way, engines die with messages in their mailboxes, and a prefill server keeps the KV
of each answer pinned until a decode server fetches it or gives notice.
"""

from collections import deque
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from request_samples import MAX_MODEL_LEN, kv_of, request
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine import FinishReason as Reason

from vllm_expertplex.client.prefixes import PrefixIndex
from vllm_expertplex.client.requests import Abort, Action, RequestTable, Send
from vllm_expertplex.executor.scheduler_keys import FIRST_TOKEN
from vllm_expertplex.layout import Layout


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
