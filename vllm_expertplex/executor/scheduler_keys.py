"""The key under which a decode server learns its request's first token. No vLLM import."""

from typing import Any

# In `kv_transfer_params`, which vLLM carries from the client to scheduler and worker.
FIRST_TOKEN = "expertplex_first_token"


def first_token(kv_transfer_params: dict[str, Any] | None) -> int | None:
    """The token that prefill sampled, or None where decode must sample it itself."""
    return None if kv_transfer_params is None else kv_transfer_params.get(FIRST_TOKEN)
