"""The life of a request across two servers, as a table of states.

Owns: what each request holds on which server, and what must be done when something happens to it.
Must not know: sockets, event loops; every method returns what to do instead of doing it.

| state | the request holds | leaves it by |
|---|---|---|
| PREFILL | its prompt's KV on a prefill server | that server's answer, abort, loss |
| ABORTED | perhaps KV there: its answer may be on the way | the answer, or word that none comes |
| HANDOFF | finished KV on the prefill server, to be fetched | being sent to decode, abort, loss |
| DECODE | everything on a decode server, which also frees prefill's side | its end, abort, loss |

A prefill answer that carries KV for a request that is not alive is always released, through any
decode server: that is how vLLM frees it before its lease ends.
"""

import copy
import enum
import time
from collections.abc import Iterable
from typing import Any

import msgspec
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreRequest, FinishReason

from vllm_expertplex.client.failures import Failures
from vllm_expertplex.client.kv_events import keys_of
from vllm_expertplex.client.prefixes import Key, PrefixIndex
from vllm_expertplex.client.router import NoServerLeft, Router
from vllm_expertplex.executor.scheduler_keys import FIRST_TOKEN
from vllm_expertplex.layout import DECODE, PREFILL, Layout


class State(enum.Enum):
    PREFILL = "prefill"
    ABORTED = "aborted"
    HANDOFF = "handoff"
    DECODE = "decode"


class Send(msgspec.Struct, frozen=True):
    """Add `request` to engine `engine`."""

    engine: int
    request: Any


class Abort(msgspec.Struct, frozen=True):
    """Abort `request_ids` on `engine`; if `confirm`, call `forget` once it has answered."""

    engine: int
    request_ids: list[str]
    confirm: bool = False


Action = Send | Abort


class Entry:
    """One request: its state and what that state holds."""

    __slots__ = (
        *("handed_s", "keys", "kv", "load", "prefill"),
        *("request", "resample", "server", "state", "token"),
    )

    def __init__(self, request: EngineCoreRequest, server: int, load: int, keys: list[Key]) -> None:
        self.state = State.PREFILL
        self.request = request
        self.server = self.prefill = server
        self.load = load
        self.keys = keys  # the prompt's blocks, where prefill servers are told apart by them
        self.kv: dict[str, Any] | None = None
        self.token: int | None = None
        self.resample = False
        self.handed_s: float | None = None  # when decode was sent it, until decode's first output


class RequestTable:
    """All requests of a deployment. Engines are numbered as in the layout: prefill, then decode.

    `prefixes`: what prefill servers' KV caches hold; None where that makes no difference.
    """

    def __init__(
        self, layout: Layout, max_model_len: int, prefixes: PrefixIndex | None = None
    ) -> None:
        self._prefixes = prefixes
        self._layout = layout
        self._prefills = layout.prefill
        self._max_model_len = max_model_len
        self._entries: dict[str, Entry] = {}
        self._handoffs: list[str] = []
        engines = layout.prefill + layout.decode
        self.routers = {
            PREFILL: Router(PREFILL, range(layout.prefill)),
            DECODE: Router(DECODE, range(layout.prefill, engines)),
        }
        self.failures = Failures()
        self.released = 0  # prefill answers whose KV was given back unused
        # From sending a request to decode until its first output there: queue, KV transfer, step.
        self.handoffs = 0
        self.handoff_s = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def count(self) -> dict[str, int]:
        """Requests by state."""
        counts = {state.value: 0 for state in State}
        for entry in self._entries.values():
            counts[entry.state.value] += 1
        return counts

    # -- from the API side ---------------------------------------------------------------------

    def add(self, request: EngineCoreRequest) -> list[Action]:
        """A new request goes to a prefill server. Raises NoServerLeft, and ValueError for streamed
        input and for an id that is in use: its server could not tell the two apart.
        """
        if request.abort_immediately:
            # vLLM's own word that a request with transferred KV was rejected before admission.
            return [Send(self._any_decode(), request)]
        if request.resumable:
            raise ValueError("streamed input is not supported by ExpertPlex; send it as one prompt")
        if request.request_id in self._entries:
            raise ValueError(
                f"request id {request.request_id!r} is still in use; give each request its own"
            )
        load = _prompt_tokens(request)
        router = self.routers[PREFILL]
        keys: list[Key] = []
        saved = dict.fromkeys(router.servers, 0)
        if self._prefixes is not None:
            keys = keys_of(request, self._prefixes)
            for server in saved:  # the last token is computed in any case
                saved[server] = min(self._prefixes.cached(server, keys), load - 1)
        server = router.take(load, saved)
        if self._prefixes is not None:
            self._prefixes.promise(server, keys)
        self._entries[request.request_id] = Entry(request, server, load - saved[server], keys)
        return [Send(server, _prefill_request(request))]

    def abort(self, request_ids: Iterable[str]) -> list[Action]:
        """The client went away, or a stop string ended the request."""
        at_prefill: dict[int, list[str]] = {}
        at_decode: dict[int, list[str]] = {}
        actions: list[Action] = []
        for request_id in request_ids:
            entry = self._entries.get(request_id)
            if entry is None or entry.state is State.ABORTED:
                continue
            if entry.state is State.PREFILL:
                entry.state = State.ABORTED
                at_prefill.setdefault(entry.server, []).append(request_id)
            elif entry.state is State.HANDOFF:
                self._remove(request_id)
                actions += self._release(request_id, entry.kv)
            else:
                self._remove(request_id)
                at_decode.setdefault(entry.server, []).append(request_id)
        actions += [Abort(engine, ids, confirm=True) for engine, ids in at_prefill.items()]
        actions += [Abort(engine, ids) for engine, ids in at_decode.items()]
        return actions

    def forget(self, request_ids: Iterable[str]) -> None:
        """A prefill server has dealt with these aborts: no answer for them is on its way."""
        for request_id in request_ids:
            entry = self._entries.get(request_id)
            if entry is not None and entry.state is State.ABORTED:
                self._remove(request_id)

    def hand_off(self) -> list[Action]:
        """Send every request whose prefill is done, and whose first token has been looked at."""
        actions: list[Action] = []
        for request_id in self._handoffs:
            entry = self._entries.get(request_id)
            if entry is None or entry.state is not State.HANDOFF:
                continue
            server = self.routers[DECODE].take(1)
            decode = _decode_request(entry)
            entry.state, entry.server, entry.load = State.DECODE, server, 1
            entry.kv, entry.handed_s = None, time.monotonic()
            actions.append(Send(server, decode))
        self._handoffs.clear()
        return actions

    # -- from the engines ----------------------------------------------------------------------

    def output(
        self, engine: int, output: EngineCoreOutput
    ) -> tuple[EngineCoreOutput | None, list[Action]]:
        """An engine's output: what to show the user, and what to do."""
        if engine < self._prefills:
            return self._prefill_output(output)
        return self._decode_output(output), []

    def _prefill_output(
        self, output: EngineCoreOutput
    ) -> tuple[EngineCoreOutput | None, list[Action]]:
        request_id = output.request_id
        kv, output.kv_transfer_params = output.kv_transfer_params, None
        entry = self._entries.get(request_id)
        if entry is None or entry.state is not State.PREFILL:
            if output.finish_reason is None:
                return None, []
            if entry is not None:
                self._remove(request_id)
            return None, self._release(request_id, kv)
        if output.finish_reason is None:
            return output, []
        if self._ends_at_prefill(entry.request, output):
            self._remove(request_id)
            return output, self._release(request_id, kv)
        self._leave_prefill(entry)
        entry.state, entry.kv = State.HANDOFF, kv
        self._handoffs.append(request_id)
        entry.resample = _must_resample(entry.request, kv)
        if entry.resample:
            return None, []
        entry.token = output.new_token_ids[0]
        output.finish_reason = output.stop_reason = None
        return output, []

    def _ends_at_prefill(self, request: EngineCoreRequest, output: EngineCoreOutput) -> bool:
        """Whether prefill's end is the request's: prefill always ends by LENGTH after one token."""
        if output.finish_reason != FinishReason.LENGTH:
            return True
        assert request.sampling_params is not None
        full = _prompt_tokens(request) + 1 >= self._max_model_len
        return request.sampling_params.max_tokens == 1 or full

    def _decode_output(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        output.kv_transfer_params = None
        entry = self._entries.get(output.request_id)
        if entry is None:
            return None  # aborted meanwhile
        waited = entry.handed_s is not None
        if entry.handed_s is not None:
            self.handoffs += 1
            self.handoff_s += time.monotonic() - entry.handed_s
            entry.handed_s = None
        # The user's queue times and cached tokens are prefill's, if prefill has shown anything.
        if not entry.resample:
            output.prefill_stats = None
        if output.events and not entry.resample:
            preempted = EngineCoreEventType.PREEMPTED
            output.events = [e for e in output.events if e.type == preempted] or None
        if output.finish_reason is not None:
            if waited and output.finish_reason == FinishReason.ERROR:
                source = self._layout.attention_servers[entry.prefill].name
                reason = f"its KV cache could not be fetched from {source}"
                self.failures.add(output.request_id, reason)
            self._remove(output.request_id)
        return output

    def lose(self, engine: int) -> list[EngineCoreOutput]:
        """Engine `engine` is gone: the errors its requests end with. The others go on.

        Raises NoServerLeft when it was the last of its role.
        """
        role = PREFILL if engine < self._prefills else DECODE
        self.routers[role].remove(engine)
        if self._prefixes is not None:
            self._prefixes.drop(engine)
        if not self.routers[role].servers:
            raise NoServerLeft(f"no {role} server is left")
        name = self._layout.attention_servers[engine].name
        ended = [i for i, entry in self._entries.items() if entry.server == engine]
        outputs = [
            EngineCoreOutput(request_id, [], finish_reason=FinishReason.ERROR)
            for request_id in ended
            if self._entries[request_id].state is not State.ABORTED
        ]
        for request_id in ended:
            self.failures.add(request_id, f"{name} is gone")
            self._remove(request_id)
        return outputs

    # -- bookkeeping ---------------------------------------------------------------------------

    def _remove(self, request_id: str) -> None:
        entry = self._entries.pop(request_id)
        if entry.state is State.DECODE:
            self.routers[DECODE].release(entry.server, entry.load)
        else:
            self._leave_prefill(entry)

    def _leave_prefill(self, entry: Entry) -> None:
        self.routers[PREFILL].release(entry.server, entry.load)
        if self._prefixes is not None:
            self._prefixes.settle(entry.server, entry.keys)
        entry.load, entry.keys = 0, []

    def _any_decode(self) -> int:
        servers = self.routers[DECODE].servers
        if not servers:
            raise NoServerLeft("no decode server is left")
        return servers[0]

    def _release(self, request_id: str, kv: dict[str, Any] | None) -> list[Action]:
        """Free a finished prefill's KV; see `EngineCoreRequest.abort_immediately`."""
        if not kv or not kv.get("do_remote_prefill"):
            return []
        self.released += 1
        notice = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=[0],
            mm_features=None,
            sampling_params=SamplingParams(
                max_tokens=1, extra_args={"kv_transfer_params": dict(kv)}
            ),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            abort_immediately=True,
        )
        return [Send(self._any_decode(), notice)]


def _prompt_tokens(request: EngineCoreRequest) -> int:
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    return 0 if request.prompt_embeds is None else request.prompt_embeds.shape[0]


def _must_resample(request: EngineCoreRequest, kv: dict[str, Any] | None) -> bool:
    """Whether decode samples the first token: it may have prompt tokens left to compute."""
    if request.mm_features or request.prompt_embeds is not None:
        return True
    tokens = _prompt_tokens(request)
    return kv is not None and kv.get("remote_num_tokens", tokens) < tokens


def _with_kv(params: SamplingParams, kv: dict[str, Any] | None) -> None:
    """Set the parameters of the KV transfer; never a user's, who could stop an engine with them."""
    params.extra_args = {**(params.extra_args or {}), "kv_transfer_params": kv}


def _prefill_request(request: EngineCoreRequest) -> EngineCoreRequest:
    """The request as a prefill server sees it: one token, and keep the KV for whoever asks."""
    assert request.sampling_params is not None
    prefill = copy.copy(request)
    params = prefill.sampling_params = request.sampling_params.clone()
    goes_on = request.sampling_params.max_tokens != 1
    _with_kv(params, {"do_remote_decode": True, "do_remote_prefill": False} if goes_on else None)
    params.max_tokens = 1
    params.min_tokens = min(params.min_tokens, 1)
    return prefill


def _decode_request(entry: Entry) -> EngineCoreRequest:
    """The request as a decode server sees it: fetch the KV, go on after the first token."""
    assert entry.request.sampling_params is not None
    decode = copy.copy(entry.request)
    params = decode.sampling_params = entry.request.sampling_params.clone()
    kv = dict(entry.kv or {})
    if not entry.resample:
        kv[FIRST_TOKEN] = entry.token
        # Prefill delivered them; asking again would make vLLM drop the KV and recompute.
        if params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None:
            params.prompt_logprobs = None
            params.prompt_logprob_token_ids = None
            params.skip_reading_prefix_cache = False
    _with_kv(params, kv)
    return decode
