"""Whose reason a failed request is told."""

from vllm_expertplex.client.failures import Failures


def test_a_request_is_not_told_the_reason_of_one_whose_name_begins_alike() -> None:
    failures = Failures()
    failures.add("cmpl-12-0-8a6b11c0", "decode-0 is gone")
    failures.add("1_chatcmpl-cmpl-1-a9c1d2e3", "decode-1 is gone")
    failures.add("resp_7_0-b0c1d2e3", "decode-2 is gone")
    assert failures.reason("cmpl-1") is None
    assert failures.reason("resp_7") == "decode-2 is gone"
    assert failures.reason("cmpl-12") == "decode-0 is gone"
    assert failures.reason("chatcmpl-cmpl-1") == "decode-1 is gone"


def test_of_a_name_that_is_used_again_the_latest_reason_counts() -> None:
    failures = Failures()
    failures.add("cmpl-a-0-8a6b11c0", "prefill-0 is gone")
    failures.add("cmpl-a-0-a9c1d2e3", "prefill-1 is gone")
    assert failures.reason("cmpl-a") == "prefill-1 is gone"
