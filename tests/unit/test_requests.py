"""What the request table sends to the two servers of a request, and tells of them."""

from typing import Any

import pytest
from request_samples import MAX_MODEL_LEN, kv_of, request
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine import FinishReason as Reason
from vllm.v1.metrics.stats import PrefillStats

from vllm_expertplex.client.prefixes import PrefixIndex
from vllm_expertplex.client.requests import Action, RequestTable, Send
from vllm_expertplex.client.router import NoServerLeft
from vllm_expertplex.executor.scheduler_keys import FIRST_TOKEN
from vllm_expertplex.layout import Layout


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


def test_streamed_input_is_refused_with_its_first_part() -> None:
    """Prefill would keep its KV for parts that it is never sent."""
    first = request("a")
    first.resumable = True
    requests = table()
    with pytest.raises(ValueError, match="streamed input"):
        requests.add(first)
    assert len(requests) == 0


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
