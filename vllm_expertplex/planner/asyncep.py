"""AsyncEP for a prefill-only load: how many GPUs share the experts, what is offloaded, and whether
batches hide the gather.

Owns: the choice, and when ExpertPlex serves the load better. Must not know: servers, terminals.
Nothing here is measured; everything rests on the planner's latency model.
"""

from collections.abc import Callable

import msgspec
import numpy as np

from vllm_expertplex.planner.impossible import Infeasible
from vllm_expertplex.planner.search import search
from vllm_expertplex.planner.setup import Setting

NEAR_LAYERS = 4  # of an offloading deployment: two being gathered or computed, two under way
_MOST_TOKENS = 1 << 20  # of one step


class AsyncEPPlan(msgspec.Struct, frozen=True, kw_only=True):
    """`copies` deployments of `gpus` GPUs. Times in seconds, sizes in bytes.

    layer_s: gathering one layer, or prefetching its shard from host memory if that takes longer.
    threshold_tokens: prompt tokens of a step that hide it (T). step_tokens: what a step takes, the
    most that TTFT and memory allow; below T, steps wait for gathers. goodput: requests/s of all.
    """

    gpus: int
    copies: int
    offload_layers: int
    layer_s: float
    threshold_tokens: int
    step_tokens: int
    step_s: float
    goodput: float
    mfu: float
    resident_bytes: float
    host_bytes: float
    kv_tokens: int
    reasons: list[str]

    @property
    def reaches_threshold(self) -> bool:
        return self.step_tokens >= self.threshold_tokens


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """AsyncEP plans, best first, and what ExpertPlex reaches on the same GPUs (None: nothing)."""

    plans: list[AsyncEPPlan]
    expertplex: float | None
    expertplex_layout: str
    verdict: str


def plan_asyncep(setting: Setting, gpus: int) -> Comparison:
    """Compare every way to divide `gpus` GPUs into AsyncEP deployments, and ExpertPlex.

    Raises ValueError when the load generates, or when no division fits.
    """
    outputs = setting.workload.mean_output
    if outputs > 1:
        raise Infeasible(
            f"the load asks for {outputs:.0f} output tokens; AsyncEP serves answers of one token, "
            "because every further token gathers all layers again: plan without --executor asyncep"
        )
    sizes = [n for n in range(1, gpus + 1) if gpus % n == 0 and n <= setting.gpu.gpus_per_node]
    plans = [plan for n in sizes if (plan := _plan(setting, n, gpus // n)) is not None]
    if not plans:
        layer = setting.model.experts * setting.model.expert_weight_bytes
        memory = setting.memory()
        raise Infeasible(
            f"AsyncEP serves this load on no division of {gpus} x {setting.gpu.name}: every GPU "
            f"needs {memory.attention_server(1) / 1e9:.1f} GB of attention weights, three layers "
            f"of {layer / 1e9:.1f} GB and the KV of a prompt of {setting.workload.mean_input:.0f} "
            f"tokens in {memory.usable / 1e9:.1f} GB, and has to gather all layers and compute a "
            f"prompt within its part of TTFT {setting.targets.ttft:g} s; what would do: a longer "
            "--ttft, shorter prompts, or GPUs with more memory"
        )
    plans.sort(key=lambda plan: (-plan.goodput, plan.gpus))
    best = search(setting.problem(gpus), setting.space(gpus)) if gpus >= 3 else None
    return Comparison(
        plans=plans,
        expertplex=best.goodput if best else None,
        expertplex_layout=best.layout if best else "",
        verdict=_verdict(plans[0], best.goodput if best else None),
    )


def _plan(setting: Setting, gpus: int, copies: int) -> AsyncEPPlan | None:
    """One deployment of `gpus` GPUs; None where weights or TTFT forbid it."""
    model, a, latency = setting.model, setting.assumptions, setting.latency(gpus)
    layer = model.experts * model.expert_weight_bytes
    memory = setting.memory()
    free = memory.usable - memory.attention_server(1)
    whole = (model.routed_bytes if gpus == 1 else model.routed_bytes / gpus + 3 * layer, 0)
    near = (NEAR_LAYERS * layer / gpus + 3 * layer, NEAR_LAYERS)
    kept, offload = whole if whole[0] < 0.9 * free else near
    kv = (free - kept) / max(model.kv_bytes_per_token, 1.0)
    length = setting.workload.mean_input
    if kept >= free or kv < length:
        return None
    gather = 0.0 if gpus == 1 and not offload else latency.network.weight_gather(gpus)
    layer_s = max(gather, layer / gpus / a.pcie_bytes_per_s if offload else 0.0)
    gathers = layer_s * model.moe_layers
    threshold = _tokens(lambda n: latency.whole_pass(n, length) >= a.gather_gamma * gathers)
    budget = setting.targets.ttft * a.ttft_share - a.host_prefill
    if max(gathers, latency.whole_pass(length, length)) > budget:
        return None
    within = _tokens(lambda n: latency.whole_pass(n, length) > budget) - 1
    step = int(min(within, kv))
    seconds = max(latency.whole_pass(step, length), gathers) + a.host_prefill
    peak = setting.gpu.flops(model.expert_bytes)
    useful = _flops(setting, step, length)
    return AsyncEPPlan(
        gpus=gpus,
        copies=copies,
        offload_layers=offload,
        layer_s=layer_s,
        threshold_tokens=threshold,
        step_tokens=step,
        step_s=seconds,
        goodput=gpus * copies * step / length / seconds,
        mfu=useful / seconds / peak,
        resident_bytes=memory.attention_server(1) + kept,
        host_bytes=model.routed_bytes if offload else 0.0,
        kv_tokens=int(kv),
        reasons=_reasons(layer_s, threshold, step, within, kv, offload),
    )


def _tokens(enough: Callable[[int], bool]) -> int:
    """The fewest tokens for which `enough` holds; it holds for all more."""
    low, high = 1, _MOST_TOKENS
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return low


def _flops(setting: Setting, tokens: int, length: float) -> float:
    """FLOPs of a step of prompts of `length` tokens, the head left out."""
    model = setting.model
    core = sum(a.layers * float(np.asarray(a.prefill_flops(length))) for a in model.attention)
    per_token = model.linear_parameters + model.router_parameters + model.active_routed_parameters
    return 2.0 * tokens * per_token + tokens / length * core


def _reasons(
    layer_s: float, threshold: int, step: int, within: int, kv: float, offload: int
) -> list[str]:
    found = []
    if offload:
        found.append("the experts' shards do not fit: they stay in host memory")
    if not layer_s:
        found.append("every expert is resident: nothing is gathered")
    elif step >= threshold:
        found.append(f"steps of {step} tokens hide the gather (T is {threshold})")
    else:
        limit = "TTFT" if within <= kv else "KV memory"
        found.append(f"{limit} allows steps of {step} tokens, below T = {threshold}: gathers show")
    return found


def _verdict(best: AsyncEPPlan, expertplex: float | None) -> str:
    if expertplex is None:
        return "AsyncEP: ExpertPlex cannot serve this load on these GPUs"
    ratio = best.goodput / expertplex
    if ratio >= 1:
        return f"AsyncEP: {ratio:.2f}x what ExpertPlex is predicted to reach"
    why = "" if best.reaches_threshold else ", because its steps do not reach T"
    return f"ExpertPlex: {1 / ratio:.2f}x what AsyncEP is predicted to reach{why}"
