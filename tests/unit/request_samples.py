"""Requests for the tests of the request table."""

from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

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
