"""Why no layout works, and what would make one work.

Owns: the diagnosis of an empty search. Must not know: output formats.
"""

import numpy as np

from vllm_expertplex.planner.search import Problem, search
from vllm_expertplex.planner.setup import Setting
from vllm_expertplex.planner.workload import Targets


class Infeasible(ValueError):
    """No layout serves the load; the message says what would."""


def explain(setting: Setting, gpus: int, placement: str) -> Infeasible:
    """The error to raise after a search found nothing."""
    text = (
        _memory(setting, gpus) or _attention(setting, gpus) or _targets(setting, gpus, placement)
        or "no layout of these GPUs serves the load"
    )  # fmt: skip
    return Infeasible(text)


def _memory(setting: Setting, gpus: int) -> str | None:
    memory, model = setting.memory(), setting.model
    most = min(gpus - 2, model.experts)
    if most < 1:
        return f"{gpus} GPUs: ExpertPlex needs at least 3, one prefill, one decode, one MoE server"
    need = float(memory.moe_server(1.0, 1.0, most))
    if need <= memory.usable:
        return None
    fewest = _fewest_moe(setting)
    head = (
        f"{model.name} does not fit on {gpus} x {setting.gpu.name}: with {most} MoE servers each "
        f"holds {need / 1e9:.1f} GB of {memory.usable / 1e9:.1f} GB usable "
        f"({setting.gpu.memory_bytes / 1e9:.0f} GB x {setting.assumptions.memory_utilisation:g})"
    )
    ways = []
    if fewest:
        ways.append(f"at least {fewest + 2} of these GPUs")
    size = need / setting.assumptions.memory_utilisation / 1e9
    ways.append(f"GPUs of {size:.0f} GB or more")
    if model.expert_bytes > 0.9:
        ways.append("a checkpoint with smaller weights")
    return f"{head}; what would do: {', or '.join(ways)}"


def _fewest_moe(setting: Setting) -> int:
    """Fewest MoE servers that hold the experts, with one source of each phase; 0 when none do."""
    counts = np.arange(1, setting.model.experts + 1)
    fitting = counts[setting.memory().moe_fits(1.0, 1.0, counts.astype(float))]
    return int(fitting[0]) if fitting.size else 0


def _attention(setting: Setting, gpus: int) -> str | None:
    memory, w = setting.memory(), setting.workload
    length = w.mean_input + w.mean_output
    fewest = _fewest_moe(setting)
    widths = [tp for tp in (1, 2, 4, 8) if 2 * tp <= gpus - fewest] or [1]
    if any(memory.requests(tp, length) >= 1 for tp in widths):
        return None
    most = max(memory.kv_tokens(tp) for tp in widths)
    return (
        f"no attention server holds one request of {length:.0f} tokens: the largest KV cache has "
        f"room for {most:.0f} beside {fewest} MoE servers on {gpus} GPUs; use shorter requests, "
        "more GPUs (for tensor parallelism) or GPUs with more memory"
    )


def _targets(setting: Setting, gpus: int, placement: str) -> str | None:
    """Find the loosest targets that are needed, by searching with each one lifted."""
    asked, share = setting.targets, setting.assumptions
    floors = {}
    for name, targets in (
        ("TTFT", Targets(1e6, asked.tpot)),
        ("TPOT", Targets(asked.ttft, 1e6)),
        ("both", Targets(1e6, 1e6)),
    ):
        lifted = setting._replace(targets=targets)
        if search(lifted.problem(gpus), lifted.space(gpus, placement)) is not None:
            floors[name] = True
    if not floors:
        return None
    problem = setting.problem(gpus)
    prefill, decode = _fastest(problem, setting, gpus)
    prefill, decode = prefill / share.ttft_share, decode / share.tpot_share
    text = []
    if prefill > asked.ttft:
        text.append(
            f"TTFT {asked.ttft:g} s is below the floor: one prompt of "
            f"{setting.workload.mean_input:.0f} tokens needs a target of {prefill:.3g} s or more "
            f"(its iteration may take {share.ttft_share:g} of it)"
        )
    if decode > asked.tpot:
        text.append(
            f"TPOT {asked.tpot:g} s is below the floor: the fastest decode iteration needs a "
            f"target of {decode:.3g} s or more (it may take {share.tpot_share:g} of it)"
        )
    if not text:
        text.append(
            f"TTFT {asked.ttft:g} s and TPOT {asked.tpot:g} s cannot be met together: alone, with "
            f"nearly all SMs, prefill needs {prefill:.3g} s and decode {decode:.3g} s"
        )
    return f"{'; '.join(text)}. Loosen that target, use faster GPUs, or allow more of them"


def _fastest(problem: Problem, setting: Setting, gpus: int) -> tuple[float, float]:
    """Shortest prefill and decode iteration of one request with nearly all SMs."""
    most = min(gpus - 2, setting.model.experts)
    moe = np.arange(1, most + 1)
    moe = moe[problem.memory.moe_fits(1.0, 1.0, moe.astype(float))]
    one = np.ones_like(moe, dtype=float)
    prefill, decode = [], []
    for tp in (t for t in (1, 2, 4, 8) if t < gpus - 1):
        for overlap in problem.latency.overlaps:
            full = np.full_like(moe, problem.sms - setting.assumptions.sm_step)
            least = np.full_like(moe, setting.assumptions.sm_step)
            gpu = np.full_like(moe, tp)
            prefill.append(np.min(problem.prefill_parts(one, gpu, moe, least, tp, overlap).total))
            decode.append(np.min(problem.decode_parts(one, gpu, moe, full, tp, overlap).total))
    return float(min(prefill)), float(min(decode))
