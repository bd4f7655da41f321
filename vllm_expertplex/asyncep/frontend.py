"""Which engine a request goes to, and when: F1 to F3 of the MoE-Prefill paper (section 4).

Owns: the choice, each engine's backlog in FLOPs, batches and their deadline.
Must not know: sockets, event loops, clocks; time is an argument, and methods return what to do.

F1: a request goes to the engine that holds most of its prefix. F2: load is the FLOPs a request
adds there. F3: requests are held back until together they reach T, the FLOPs per layer that take
as long as gathering a layer's experts; then they go to the engine as one batch, with whatever else
fits the tokens of the same step. What the paper leaves open:
- *low load*: a request is not held back when no more than T would come within `max_wait_s`, going
  by the last second's arrivals, and never longer than `max_wait_s` while its engine is idle;
- *a busy engine* gets its next batch once that batch is full, so that it never runs dry, and
  nothing more: what comes meanwhile can still join other work, or go elsewhere;
- *one prefix for all*: an engine with more than 2 T of backlog no longer attracts requests by
  prefix; they go where they are done first;
- *siblings* (requests that must run in one batch) are submitted under one group, and are placed
  and released together.
"""

from collections import deque
from collections.abc import Sequence

import msgspec

from vllm_expertplex.asyncep.flops import Flops
from vllm_expertplex.client.prefixes import Key, PrefixIndex

_RATE_WINDOW_S = 1.0
# One running, one planned behind it, and one for the engine to plan when the first ends: it plans
# before an answer to that can bring it anything new.
_BATCHES_AHEAD = 3
_PILE = 2.0  # thresholds of backlog beyond which a prefix does not attract


class NoEngineLeft(RuntimeError):
    """Every engine is gone."""


class Batch(msgspec.Struct, frozen=True):
    """Send these requests to `engine`, to be computed together."""

    engine: int
    request_ids: list[str]


class _Request(msgspec.Struct):
    id: str
    tokens: int
    keys: list[Key]
    engine: int = -1
    flops: float = 0.0
    new: int = 0  # tokens to compute
    since: float = 0.0
    batch: int = -1  # -1: held back


class _Group(msgspec.Struct):
    """Siblings of which some have not come yet."""

    members: list[_Request]
    missing: int
    since: float


class _Engine:
    def __init__(self) -> None:
        self.held: deque[list[_Request]] = deque()  # groups, oldest first
        self.held_flops = 0.0
        self.sent_flops = 0.0
        self.batches: dict[int, int] = {}  # batch -> requests without an answer
        self.arrivals: deque[tuple[float, float]] = deque()  # time, FLOPs

    @property
    def backlog(self) -> float:
        return self.held_flops + self.sent_flops

    def rate(self, now: float) -> float:
        """FLOPs per second that came in the last second."""
        while self.arrivals and self.arrivals[0][0] < now - _RATE_WINDOW_S:
            self.arrivals.popleft()
        return sum(flops for _, flops in self.arrivals) / _RATE_WINDOW_S


class Frontend:
    """Requests enter by `submit`, leave held-back state by `release`, and end by `answered` (the
    first output came) or `drop` (aborted).

    `threshold` is T in FLOPs per layer; 0 holds nothing back. A batch of T or more takes what is
    held back up to `step`, the most tokens an engine computes at once.
    """

    def __init__(
        self,
        engines: Sequence[int],
        flops: Flops,
        index: PrefixIndex,
        threshold: float,
        max_wait_s: float,
        step: int = 0,
    ) -> None:
        self.threshold = threshold
        self._step = step
        self.max_wait_s = max_wait_s
        self._flops = flops
        self._index = index
        self._engines = {engine: _Engine() for engine in engines}
        self._requests: dict[str, _Request] = {}
        self._groups: dict[str, _Group] = {}
        self._next_batch = 0

    # -- in ------------------------------------------------------------------------------------

    def submit(
        self,
        request_id: str,
        tokens: int,
        keys: list[Key],
        now: float,
        group: tuple[str, int] | None = None,
    ) -> None:
        """Take a prompt of `tokens` tokens whose blocks are `keys`.

        `group` is a name and how many requests carry it; they wait for each other, `max_wait_s` at
        most. Raises NoEngineLeft.
        """
        request = _Request(request_id, tokens, keys)
        self._requests[request_id] = request
        if group is None:
            self._place([request], now)
            return
        name, size = group
        siblings = self._groups.setdefault(name, _Group([], size, now))
        siblings.members.append(request)
        siblings.missing -= 1
        if siblings.missing <= 0:
            self._place(self._groups.pop(name).members, now)

    def _place(self, members: list[_Request], now: float) -> None:
        if not members:
            return
        engine = self._choose(members[0])
        state = self._engines[engine]
        for request in members:
            request.engine, request.since = engine, now
            request.new, request.flops = self._cost(engine, request)
            self._index.promise(engine, request.keys)
            state.held_flops += request.flops
            state.arrivals.append((now, request.flops))
        state.held.append(members)

    def _choose(self, request: _Request) -> int:
        if not self._engines:
            raise NoEngineLeft("no engine is left")
        backlog = {engine: state.backlog for engine, state in self._engines.items()}

        def rank(engine: int) -> tuple[float, ...]:
            """The longest prefix; then the least loaded, and the one with most room for KV."""
            cached = self._index.cached(engine, request.keys)
            return cached, -backlog[engine], -self._index.blocks(engine), -engine

        best = max(backlog, key=rank)
        if backlog[best] <= _PILE * self.threshold:
            return best
        return min(backlog, key=lambda engine: backlog[engine] + self._cost(engine, request)[1])

    def _cost(self, engine: int, request: _Request) -> tuple[int, float]:
        """Tokens to compute, and FLOPs per layer."""
        # The last token is always computed, because its logits are the answer, and with it what
        # else is in its block.
        size = self._index.block_size
        most = max(0, request.tokens - 1) // size * size
        cached = min(self._index.cached(engine, request.keys), most)
        new = request.tokens - cached
        return new, self._flops.new(new, cached)

    # -- out -----------------------------------------------------------------------------------

    def release(self, now: float) -> list[Batch]:
        """The batches that are due now."""
        for name, group in list(self._groups.items()):
            if now >= group.since + self.max_wait_s:
                del self._groups[name]
                self._place(group.members, now)
        due = []
        for engine, state in self._engines.items():
            while self._is_due(state, now):
                due.append(self._make_batch(engine, state))
        return due

    def _is_due(self, state: _Engine, now: float) -> bool:
        if not state.held or not self.threshold:
            return bool(state.held)
        if len(state.batches) >= _BATCHES_AHEAD:
            return False
        if state.held_flops >= self.threshold:
            return True
        return not state.batches and now >= self._flush_at(state, now)

    def _flush_at(self, state: _Engine, now: float) -> float:
        """When an idle engine gets less than T."""
        deadline = state.held[0][0].since + self.max_wait_s
        coming = state.rate(now) * max(0.0, deadline - now)
        return deadline if state.held_flops + coming >= self.threshold else now

    def _make_batch(self, engine: int, state: _Engine) -> Batch:
        batch, self._next_batch = self._next_batch, self._next_batch + 1
        ids: list[str] = []
        flops, tokens = 0.0, 0
        while state.held and self._fits(state.held[0], flops, tokens):
            for request in state.held.popleft():
                ids.append(request.id)
                flops += request.flops
                tokens += request.new
                request.batch = batch
        state.held_flops = sum(r.flops for group in state.held for r in group)
        state.sent_flops += flops
        state.batches[batch] = len(ids)
        return Batch(engine, ids)

    def _fits(self, group: list[_Request], flops: float, tokens: int) -> bool:
        """Whether a batch of so many FLOPs and tokens takes `group` too."""
        whole = tokens + sum(request.new for request in group)
        return not self.threshold or flops < self.threshold or whole <= self._step

    def wake_at(self, now: float) -> float | None:
        """When to call `release` again if nothing happens before; None if never."""
        times = [
            self._flush_at(state, now)
            for state in self._engines.values()
            if state.held and not state.batches
        ]
        times += [group.since + self.max_wait_s for group in self._groups.values()]
        return min(times, default=None)

    # -- ends ----------------------------------------------------------------------------------

    def answered(self, request_id: str) -> None:
        """The request's prompt is computed. Idempotent."""
        self._end(request_id)

    def drop(self, request_id: str) -> bool:
        """The request is not wanted any more. True when its engine has been sent it."""
        request = self._requests.get(request_id)
        if request is None:
            return True  # answered: its engine knows it
        for group in self._groups.values():
            if request in group.members:
                group.members.remove(request)
                del self._requests[request_id]
                return False
        sent = request.batch >= 0
        self._end(request_id)
        return sent

    def _end(self, request_id: str) -> None:
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        self._index.settle(request.engine, request.keys)
        state = self._engines.get(request.engine)
        if state is None:
            return
        if request.batch < 0:
            for group in state.held:
                if request in group:
                    group.remove(request)
            state.held = deque(group for group in state.held if group)
            state.held_flops = sum(r.flops for group in state.held for r in group)
            return
        state.sent_flops -= request.flops
        state.batches[request.batch] -= 1
        if state.batches[request.batch] == 0:
            del state.batches[request.batch]
        if not state.batches:
            state.sent_flops = 0.0  # no rounding left over

    def lose(self, engine: int, now: float) -> list[str]:
        """An engine is gone. What was held back for it goes elsewhere; returns the ids of requests
        that it had been sent. Raises NoEngineLeft when it was the last one.
        """
        state = self._engines.pop(engine)
        self._index.drop(engine)
        sent = [r.id for r in self._requests.values() if r.engine == engine and r.batch >= 0]
        for request_id in sent:
            del self._requests[request_id]
        for group in state.held:
            self._place(group, now)
        return sent

    # -- what can be seen ----------------------------------------------------------------------

    def backlog(self) -> dict[int, float]:
        """Engine -> FLOPs per layer held back for it or under way there."""
        return {engine: state.backlog for engine, state in self._engines.items()}

    @property
    def held(self) -> int:
        """Requests that are held back."""
        waiting = sum(len(group.members) for group in self._groups.values())
        return waiting + sum(len(g) for state in self._engines.values() for g in state.held)
