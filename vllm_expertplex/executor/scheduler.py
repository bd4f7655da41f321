"""Decode schedulers that start a request with the token its prefill server already sampled.

Owns: handing that token to vLLM's scheduler and grammar. Must not know: where it came from.

With the token appended as output, vLLM fetches the KV of the whole prompt and computes only the
token's own (v1/core/sched/scheduler.py, requests with external KV).
"""

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from vllm_expertplex.executor.kv_arrivals import KVArrivals
from vllm_expertplex.executor.scheduler_keys import first_token


class _Prompt:
    """A request as it was without its first token."""

    def __init__(self, request: Any) -> None:
        self._request = request

    @property
    def num_tokens(self) -> int:
        return int(self._request.num_prompt_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


class _FirstToken:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        look_up = self.kv_cache_manager.get_computed_blocks  # type: ignore[attr-defined]

        def get_computed_blocks(request: Any) -> Any:
            # Of a prompt that fills its last block, prefill has computed that block again, as
            # plain vLLM does: its KV is the one to go on with, not an older one cached here.
            fetched = first_token(request.kv_transfer_params) is not None
            first = fetched and request.num_output_tokens == 1
            return look_up(_Prompt(request) if first else request)

        self.kv_cache_manager.get_computed_blocks = get_computed_blocks  # type: ignore[attr-defined]

    def add_request(self, request: Any) -> None:
        token = first_token(request.kv_transfer_params)
        if token is not None and not request.abort_immediately and not request.output_token_ids:
            request.append_output_token_ids(token)
        super().add_request(request)  # type: ignore[misc]

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        waited_for_grammar = request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        ready = super()._handle_blocked_waiting_request(request)  # type: ignore[misc]
        token = first_token(request.kv_transfer_params)
        if not (ready and waited_for_grammar) or token is None:
            return ready
        if self.structured_output_manager.accept_tokens(request, [token]):  # type: ignore[attr-defined]
            return True
        # Prefill sampled under the same grammar, so this means the two sides disagree about it.
        self.grammar_compile_error_reqs.add(request.request_id)  # type: ignore[attr-defined]
        return False


class DecodeScheduler(KVArrivals, _FirstToken, Scheduler):
    """vLLM's scheduler on a decode server."""


class AsyncDecodeScheduler(KVArrivals, _FirstToken, AsyncScheduler):
    """vLLM's asynchronous scheduler on a decode server."""
