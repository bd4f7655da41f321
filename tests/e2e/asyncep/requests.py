"""What the AsyncEP tests ask, from the parity suite's requests."""

from ..parity.suite import Request

_GROUPS = {"greedy", "sampling", "n", "logprobs", "prompt_logprobs", "stop", "echo"}
_LENGTHS = {"1 tokens", "17 tokens", "128 tokens", "1025 tokens"}


def chosen(request: Request) -> bool:
    """Generation and logprobs of every kind, some lengths, and all that are sent together."""
    if request.case.group == "lengths":
        return request.case.name in _LENGTHS
    if request.stream:
        return request.case.name in {"completion", "chat"}
    return request.case.group in _GROUPS or request.case.name.isdigit()
