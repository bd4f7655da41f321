"""Why no layout works, and what would make one work.

Owns: the diagnosis of an empty search. Must not know: output formats.
"""

import math
from collections.abc import Callable

import numpy as np

from vllm_expertplex.layout import Layout
from vllm_expertplex.planner.search import search
from vllm_expertplex.planner.search_shared import search_shared
from vllm_expertplex.planner.setup import Setting
from vllm_expertplex.planner.sharing import Sharing
from vllm_expertplex.planner.workload import Targets

NO_TARGET = 1e6  # seconds


class Infeasible(ValueError):
    """Nothing serves the load; the message says what would."""


def exit_code(error: ValueError) -> int:
    """Of a command that ends with `error`: 1 for a load that cannot be served, 2 for bad usage."""
    return 1 if isinstance(error, Infeasible) else 2


def explain(setting: Setting, gpus: int, placement: str, shared: bool = False) -> Infeasible:
    """The error to raise after a search found nothing."""
    full = (
        _shared_memory(setting, gpus)
        if shared
        else _ranks(setting, gpus) or _memory(setting, gpus) or _attention(setting, gpus)
    )

    def feasible(targets: Targets) -> bool:
        lifted = setting._replace(targets=targets)
        if shared:
            return bool(search_shared(lifted, gpus))
        return search(lifted.problem(gpus), lifted.space(gpus, placement)) is not None

    text = (
        full or _targets(setting, gpus, feasible)
        or f"no layout of {gpus} x {setting.gpu.name} serves the load, not even "
        f"within {NO_TARGET:g} s; a rate or an assumption is far off: check --gpu-set, --set"
    )  # fmt: skip
    return Infeasible(text)


def _ranks(setting: Setting, gpus: int) -> str | None:
    """Where attention servers of the ranks that are asked for cannot be."""
    ranks, model = setting.ranks or 1, setting.model
    if not setting.widths:
        return f"{ranks} ranks cannot share the attention heads of {model.name} evenly"
    if gpus > 2 * ranks:
        return None
    return (
        f"a prefill and a decode server of {ranks} ranks each and a MoE server need "
        f"{2 * ranks + 1} GPUs, found {gpus}"
    )


def _memory(setting: Setting, gpus: int) -> str | None:
    memory, model = setting.memory(), setting.model
    attention = 2 * min(setting.widths)
    most = min(gpus - attention, model.experts)
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
        ways.append(f"at least {fewest + attention} of these GPUs")
    size = need / setting.assumptions.memory_utilisation / 1e9
    ways.append(f"GPUs of {size:.0f} GB or more")
    if model.expert_bytes > 0.9:
        ways.append("a checkpoint with smaller weights")
    return f"{head}; what would do: {', or '.join(ways)}"


def _shared_memory(setting: Setting, gpus: int) -> str | None:
    """Where not even a request fits beside a MoE server on every GPU: how many GPUs would do."""
    w, a = setting.workload, setting.assumptions
    length = w.mean_input + w.mean_output

    def room(count: int) -> tuple[int, float]:
        """Requests, and bytes of a GPU with all its weights and buffers."""
        sharing = Sharing(Layout(1, 1, count), 50, 50)
        memory = setting._replace(sharing=sharing).memory()
        held = float(memory.moe_server(1, 1, count)) + sharing.readers * memory.attention_server(1)
        return memory.requests(1, length), held

    requests, need = room(gpus)
    if requests:
        return None
    most = min(setting.model.experts, setting.gpu.gpus_per_node)
    enough = [count for count in range(1, most + 1) if room(count)[0]]
    ways = []
    if enough:
        option = " (--shared)" if enough[0] > 2 else ""
        ways.append(f"at least {enough[0]} of these GPUs{option}")
    size = need / a.memory_utilisation / 1e9
    ways.append(f"GPUs of more than {size:.0f} GB")
    return (
        f"{setting.model.name} does not fit on {gpus} x {setting.gpu.name} that its servers share: "
        f"experts, buffers and attention take {need / 1e9:.1f} GB of each, and KV of {length:.0f} "
        f"tokens comes on top, of {setting.memory().usable / 1e9:.1f} GB usable; what would do: "
        f"{', or '.join(ways)}"
    )


def _fewest_moe(setting: Setting) -> int:
    """Fewest MoE servers that hold the experts, with one source of each phase; 0 when none do."""
    counts = np.arange(1, setting.model.experts + 1)
    fitting = counts[setting.memory().moe_fits(1.0, 1.0, counts.astype(float))]
    return int(fitting[0]) if fitting.size else 0


def _attention(setting: Setting, gpus: int) -> str | None:
    memory, w = setting.memory(), setting.workload
    length = w.mean_input + w.mean_output
    fewest = _fewest_moe(setting)
    widths = [tp for tp in setting.widths if 2 * tp <= gpus - fewest] or [1]
    if any(memory.requests(tp, length) >= 1 for tp in widths):
        return None
    most = max(memory.kv_tokens(tp) for tp in widths)
    return (
        f"no attention server holds one request of {length:.0f} tokens: the largest KV cache has "
        f"room for {most:.0f} beside {fewest} MoE servers on {gpus} GPUs; use shorter requests, "
        "more GPUs (for tensor parallelism) or GPUs with more memory"
    )


def _targets(setting: Setting, gpus: int, feasible: Callable[[Targets], bool]) -> str | None:
    """The smallest changes of the targets that make a layout feasible, found by searching."""
    asked = setting.targets
    if not feasible(Targets(NO_TARGET, NO_TARGET)):
        return None
    ways = []
    if feasible(Targets(NO_TARGET, asked.tpot)):
        least = _least(lambda t: feasible(Targets(t, asked.tpot)), asked.ttft)
        ways.append(f"TTFT of {least:.3g} s or more with TPOT {asked.tpot:g} s")
    if feasible(Targets(asked.ttft, NO_TARGET)):
        least = _least(lambda t: feasible(Targets(asked.ttft, t)), asked.tpot)
        ways.append(f"TPOT of {least:.3g} s or more with TTFT {asked.ttft:g} s")
    if not ways:
        ttft = _least(lambda t: feasible(Targets(t, NO_TARGET)), asked.ttft)
        tpot = _least(lambda t: feasible(Targets(ttft, t)), asked.tpot)
        ways.append(f"TTFT of {ttft:.3g} s or more and TPOT of {tpot:.3g} s or more together")
    a = setting.assumptions
    return (
        f"TTFT {asked.ttft:g} s and TPOT {asked.tpot:g} s are below the floor of {gpus} x "
        f"{setting.gpu.name} for prompts of {setting.workload.mean_input:.0f} tokens (an iteration "
        f"may take {a.ttft_share:g} of TTFT and {a.tpot_share:g} of TPOT); what would do: a "
        f"{', or a '.join(ways)}; or more or faster GPUs"
    )


def _least(feasible: Callable[[float], bool], low: float) -> float:
    """Smallest feasible target above `low`, to 1 %, rounded up to three digits; there is one."""
    high = NO_TARGET
    while high / low > 1.01:
        middle = low**0.5 * high**0.5
        low, high = (low, middle) if feasible(middle) else (middle, high)
    digit = 10.0 ** (math.floor(math.log10(high)) - 2)
    return math.ceil(high / digit) * digit
