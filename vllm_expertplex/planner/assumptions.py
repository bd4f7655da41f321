"""Every constant of the model that is neither a data-sheet value nor an equation.

Owns: their values, units and reasons; a plan prints them. Must not know: how they are used.
"""

from typing import Annotated

import msgspec

from vllm_expertplex.planner.numbers import Amount, Count, Rate, Share, checked, parse

Tile = Annotated[int, msgspec.Meta(ge=1, le=4096)]
US = 1e-6
GB = 1e9


class Assumptions(msgspec.Struct, frozen=True, kw_only=True):
    """Constants with a stated reason (`REASONS`). Times in seconds, sizes in bytes."""

    ttft_share: Share = 0.5
    tpot_share: Share = 0.9
    routing_sigma: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.35
    contiguous_tile: Tile = 128
    masked_tile: Tile = 64
    cluster: Count = 2
    sm_step: Count = 12
    hbm_saturation: Share = 0.45
    apk_prefill_overhead: Amount = 0.12
    apk_decode_overhead: Amount = 0.10
    attention_floor_decode: Amount = 30 * US
    attention_floor_prefill: Amount = 60 * US
    moe_floor: Amount = 10 * US
    signal: Amount = 1.2 * US
    exchange_floor: Amount = 3.3 * US
    allreduce_floor: Amount = 8 * US
    rdma_latency: Amount = 5 * US
    host_prefill: Amount = 4e-3
    host_decode: Amount = 0.0
    memory_utilisation: Share = 0.88
    runtime_reserve: Amount = 4 * GB
    graph_reserve: Amount = 1.5 * GB
    combine_bytes: Rate = 2.0
    buffers: str = "worst"
    pcie_bytes_per_s: Rate = 50 * GB
    gather_gamma: Rate = 1.2
    prefill_tokens: Count = 8192
    decode_slots: Count = 256
    max_prefill_requests: Count = 64


REASONS: dict[str, str] = {
    "ttft_share": "largest prefill iteration as a part of the TTFT target; the rest is queueing "
    "(1.0 = Algorithm 1 to the letter)",
    "tpot_share": "largest decode iteration as a part of the TPOT target; the rest is jitter",
    "routing_sigma": "log-normal spread of expert popularity when no histogram is given",
    "contiguous_tile": "rows of a tile in prefill (M_t of eq. 3)",
    "masked_tile": "rows of a tile in decode (M_t of eq. 3)",
    "cluster": "CTAs of a cluster; SM budgets are multiples of it (eq. 4)",
    "sm_step": "step of the SM budgets tried",
    "hbm_saturation": "part of the SMs that saturates HBM; 0.47 for decode's experts, as measured "
    "on H200",
    "apk_prefill_overhead": "APK over DeepGEMM, contiguous: the paper's upper bound (Fig. 13)",
    "apk_decode_overhead": "APK over DeepGEMM, masked, many experts: the paper's bound (Fig. 13)",
    "attention_floor_decode": "launches of one attention layer inside a CUDA graph",
    "attention_floor_prefill": "launches of one attention layer without a graph",
    "moe_floor": "fixed time of one MoE operation (scatter to gather)",
    "signal": "one release/acquire signal over NVLink: measured on H200",
    "exchange_floor": "fixed cost of one dispatch and combine: measured on H200",
    "allreduce_floor": "fixed cost of one tensor-parallel all-reduce",
    "rdma_latency": "one RDMA write or read with its completion",
    "host_prefill": "scheduling and sampling around one prefill iteration",
    "host_decode": "what scheduling adds to a decode iteration: vLLM plans the next while one runs",
    "memory_utilisation": "usable part of GPU memory; 0.88 is the default of SGLang, the base of "
    "the paper's system",
    "runtime_reserve": "context, workspaces and communication state on a MoE GPU",
    "graph_reserve": "CUDA graphs and activations on an attention GPU",
    "combine_bytes": "bytes of one element of a partial sum on the link: 2 as in the paper, 4 if"
    " sums cross in fp32",
    "buffers": "'worst': every row of every source on one MoE GPU; 'average': an even share x1.5",
    "pcie_bytes_per_s": "copies from pinned host memory to one GPU: PCIe 5.0 x16 (AsyncEP offload)",
    "gather_gamma": "margin of AsyncEP's saturation threshold: the paper's example",
    "prefill_tokens": "tokens one prefill server sends at a time; longer batches go in chunks",
    "decode_slots": "largest decode batch of one decode server",
    "max_prefill_requests": "largest prefill batch of one prefill server",
}


def override(assumptions: Assumptions, changes: list[str]) -> Assumptions:
    """Apply `name=value` changes. Raises ValueError naming what there is, or may be."""
    for change in changes:
        values = msgspec.to_builtins(assumptions)
        name = change.partition("=")[0]
        if name not in values:
            raise ValueError(
                f"assumption {name!r} is unknown; there are {', '.join(sorted(values))}"
            )
        values[name] = parse("--set", change, type(values[name]))
        if values["buffers"] not in ("worst", "average"):
            raise ValueError(f"--set {change}: expected worst or average")
        assumptions = checked("--set", change, values, Assumptions)
    return assumptions


def changed(assumptions: Assumptions) -> dict[str, object]:
    """The values that differ from the defaults, for a plan file and its table."""
    default = msgspec.to_builtins(Assumptions())
    return {k: v for k, v in msgspec.to_builtins(assumptions).items() if v != default[k]}
