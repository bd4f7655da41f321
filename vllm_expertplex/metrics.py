"""Every metric of ExpertPlex: name, labels, unit and help text, in one place.

Owns: the names. Must not know: where the numbers come from.
vLLM's own metrics carry `engine`; `expertplex:server_info` joins it to role and rank.
"""

from typing import NamedTuple


class Metric(NamedTuple):
    name: str
    help: str
    kind: str  # "gauge" or "counter"
    labels: tuple[str, ...]


_SERVER = ("role", "rank")

SERVER_INFO = Metric(
    "expertplex:server_info",
    "1 per live server; `engine` is its label in vLLM's metrics (empty for MoE servers).",
    "gauge",
    (*_SERVER, "engine", "pid", "device"),
)
WEIGHT_BYTES = Metric("expertplex:weight_bytes", "Weights a server holds.", "gauge", _SERVER)
KV_BLOCKS = Metric("expertplex:kv_blocks", "KV blocks a server has.", "gauge", _SERVER)
KV_BLOCKS_USED = Metric("expertplex:kv_blocks_used", "KV blocks in use.", "gauge", _SERVER)
TOKENS = Metric(
    "expertplex:tokens",
    "Tokens done: prompt tokens (prefill, asyncep), output tokens (decode), rows received (moe).",
    "counter",
    _SERVER,
)
HEARTBEAT_AGE = Metric(
    "expertplex:heartbeat_age_seconds", "Since a MoE server last showed life.", "gauge", _SERVER
)
REQUESTS = Metric("expertplex:requests", "Requests by state.", "gauge", ("state",))
RELEASED = Metric(
    "expertplex:prefills_released", "Prefills whose KV was freed unused.", "counter", ()
)
HANDOFFS = Metric("expertplex:handoffs", "Requests decode has begun to answer.", "counter", ())
HANDOFF_SECONDS = Metric(
    "expertplex:handoff_seconds",
    "Time from sending requests to decode until their first output there: queue, KV transfer, "
    "first decode step.",
    "counter",
    (),
)
MOE_LAYERS = Metric(
    "expertplex:remote_layers", "Remote MoE layers run by an attention server.", "counter", _SERVER
)
DISPATCH_SECONDS = Metric(
    "expertplex:dispatch_seconds", "Time pushing tokens to MoE servers.", "counter", _SERVER
)
WAIT_SECONDS = Metric(
    "expertplex:wait_seconds", "Time waiting for MoE servers.", "counter", _SERVER
)
COMBINE_SECONDS = Metric(
    "expertplex:combine_seconds", "Time pulling and adding experts' results.", "counter", _SERVER
)
MOE_OPERATIONS = Metric(
    "expertplex:operations",
    "Operations finished by a MoE server.",
    "counter",
    (*_SERVER, "phase"),
)
MOE_BUSY_SECONDS = Metric(
    "expertplex:operation_seconds",
    "Time from noticing an operation to its done word, summed over operations.",
    "counter",
    (*_SERVER, "phase"),
)

CACHED_TOKENS = Metric(
    "expertplex:cached_tokens", "Prompt tokens found in an engine's KV cache.", "counter", _SERVER
)
BACKLOG_FLOPS = Metric(
    "expertplex:backlog_flops", "FLOPs per layer held back for an engine or sent.", "gauge", _SERVER
)
GATHERS = Metric("expertplex:gathers", "Layers gathered by an engine.", "counter", _SERVER)
GATHER_SECONDS = Metric(
    "expertplex:gather_seconds", "Time those gathers took, beside computing.", "counter", _SERVER
)
GATHERED_BYTES = Metric(
    "expertplex:gathered_bytes", "Expert weights an engine pulled.", "counter", _SERVER
)
GATHER_WAIT_SECONDS = Metric(
    "expertplex:gather_wait_seconds", "Time computing waited for gathers.", "counter", _SERVER
)
THRESHOLD_FLOPS = Metric(
    "expertplex:threshold_flops", "T: FLOPs per layer that hide a gather.", "gauge", ()
)
HELD_REQUESTS = Metric(
    "expertplex:held_requests", "Requests held back until their batch reaches T.", "gauge", ()
)
BATCHES = Metric("expertplex:batches", "Batches sent to engines.", "counter", ())


def backend_metric(name: str, help_text: str) -> Metric:
    """A counter of a MoE server's backend; see `moe_server.backend.COUNTERS`."""
    gauge = name.startswith("decode_share") or "longest" in name
    return Metric(f"expertplex:{name}", help_text, "gauge" if gauge else "counter", _SERVER)
