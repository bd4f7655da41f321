"""A plan: the chosen layout with everything a server needs, what it rests on, and why.

Owns: the plan file, and the reasons. Must not know: terminals (`report.py`), servers.
"""

from typing import Annotated

import msgspec
import numpy as np

from vllm_expertplex.layout import Layout
from vllm_expertplex.planner.assumptions import changed
from vllm_expertplex.planner.files import read, write
from vllm_expertplex.planner.latency import Parts
from vllm_expertplex.planner.numbers import Count, Positive
from vllm_expertplex.planner.rates import Problem
from vllm_expertplex.planner.search import Candidate, all_layouts, search
from vllm_expertplex.planner.search_shared import search_shared
from vllm_expertplex.planner.setup import Setting
from vllm_expertplex.planner.sharing import Sharing

VERSION = 1
Percent = Annotated[int, msgspec.Meta(ge=1, le=99)]


class PhasePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One phase: its servers and batch, and its predicted iteration. Times in seconds."""

    gpus: Count
    tensor_parallel: Count
    overlap: str
    batch: Count
    rate: Positive
    iteration: Positive
    attention: float
    shared: float
    exchange: float
    moe: float
    host: float
    binds: str


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on the fullest GPU of a role. `rest`: KV cache, or what stays free."""

    role: str
    weights: float
    buffers: float
    reserve: float
    rest: float


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What `vllm-expertplex plan` writes and `vllm serve --expertplex-plan` reads.

    layout: by GPUs, of which a tensor-parallel server has several; `served` is by servers.
    decode_sms: SM budget q of decode on every MoE GPU under contention. copies: equal deployments
    to run side by side; everything else describes one of them. goodput: requests/s of one,
    predicted by the latency model and not measured. moe_sm_percent: only where servers share GPUs;
    prefill_sm_percent: only where prefill and decode servers do.
    """

    version: int = VERSION
    model: str
    gpu: str
    gpus: Count
    copies: Count
    workload: str
    ttft: float
    tpot: float
    layout: Annotated[str, msgspec.Meta(pattern="^[0-9]+P[0-9]+D[0-9]+E$")]
    moe_sm_percent: Percent | None = None
    prefill_sm_percent: Percent | None = None
    decode_sms: Count
    gpu_sms: Count
    prefill: PhasePlan
    decode: PhasePlan
    goodput: Positive
    limited_by: str
    reasons: list[str]
    max_prefill_tokens: Count
    max_decode_batch: Count
    memory: list[MemoryUse]
    next_best: list[tuple[str, float, str]]
    one_more: list[tuple[str, str, float]]
    expects: dict[str, float]
    assumptions: dict[str, float | int | str]
    changed_assumptions: dict[str, object]
    sources: dict[str, str]

    @property
    def served(self) -> Layout:
        """The layout as the serve command counts: servers, whatever ranks each has."""
        gpus = Layout.parse(self.layout)
        return Layout(
            gpus.prefill // self.prefill.tensor_parallel,
            gpus.decode // self.decode.tensor_parallel,
            gpus.moe,
        )

    @property
    def sharing(self) -> Sharing | None:
        """How servers share GPUs; None where each has its own."""
        if self.moe_sm_percent is None:
            return None
        prefill = self.prefill_sm_percent or 100
        return Sharing(Layout.parse(self.layout), self.moe_sm_percent, prefill)


class _Version(msgspec.Struct):
    """What is read first: a plan of another version may hold anything else."""

    version: int = VERSION


def read_plan(path: str) -> Plan:
    """Read a plan file. Raises ValueError naming what is wrong with it."""
    text = read("plan", path)
    try:
        version = msgspec.json.decode(text, type=_Version).version
        if version != VERSION:
            raise ValueError(
                f"plan {path}: found version {version}, expected {VERSION}; write it again with "
                "`vllm-expertplex plan`"
            )
        return msgspec.json.decode(text, type=Plan)
    except msgspec.DecodeError as error:
        raise ValueError(
            f"plan {path}: {error}; write one with `vllm-expertplex plan MODEL --output FILE`"
        ) from None


def write_plan(plan: Plan, path: str) -> None:
    write(path, msgspec.json.format(msgspec.json.encode(plan), indent=2) + b"\n")


def make_plan(
    setting: Setting,
    gpus: int,
    placement: str,
    best: Candidate,
    copies: int = 1,
    rest: list[Candidate] | None = None,
) -> Plan:
    """Turn the search's answer into a plan with its reasons.

    rest: other layouts, best first, to compare with; found here if None.
    """
    problem = setting.problem(gpus)
    a, sharing = setting.assumptions, setting.sharing
    if rest is None:
        rest = _next_best(problem, setting, gpus, placement, best)
    load = setting.routing.load(
        np.array([best.moe]), np.array([float(best.decode_batch)]), a.masked_tile
    )
    prefill_short = best.prefill_rate <= best.decode_rate
    return Plan(
        model=setting.model.name,
        gpu=setting.gpu.name,
        gpus=gpus,
        copies=copies,
        workload=setting.workload.name,
        ttft=setting.targets.ttft,
        tpot=setting.targets.tpot,
        layout=best.layout,
        moe_sm_percent=sharing.moe_sm_percent if sharing else None,
        prefill_sm_percent=sharing.prefill_sm_percent if sharing and sharing.crowded else None,
        decode_sms=best.q,
        gpu_sms=setting.gpu.sms,
        prefill=_phase(problem, best, "prefill"),
        decode=_phase(problem, best, "decode"),
        goodput=best.goodput,
        limited_by="prefill" if prefill_short else "decode",
        reasons=_reasons(setting, best, setting.space(gpus, placement).unit),
        max_prefill_tokens=a.prefill_tokens,
        max_decode_batch=-(-best.decode_batch * best.tp_decode // best.decode),
        memory=_memory(setting, best),
        next_best=[
            (c.layout, c.goodput, "prefill" if c.prefill_rate <= c.decode_rate else "decode")
            for c in rest[:4]
        ],
        one_more=_one_more(setting, gpus, placement),
        expects={
            "x_moe": float(load.x_moe[0]),
            "active_experts_busiest": float(load.active[0]),
            "rows_busiest": float(load.rows[0]),
            "kv_transfer_s": problem.kv_transfer,
        },
        assumptions=msgspec.to_builtins(a),
        changed_assumptions=changed(a),
        sources={
            "model": setting.model.source,
            "gpu": setting.gpu.source,
            "kernels": setting.kernels.source,
            "routing": setting.routing.source,
            "workload": setting.workload.source,
        },
    )


def _phase(problem: Problem, c: Candidate, phase: str) -> PhasePlan:
    prefill = phase == "prefill"
    gpus, tp = (c.prefill, c.tp_prefill) if prefill else (c.decode, c.tp_decode)
    batch = c.prefill_batch if prefill else c.decode_batch
    overlap = c.prefill_overlap if prefill else c.decode_overlap
    parts = _iteration(problem, c, phase, batch)

    def value(x: object) -> float:
        return float(np.squeeze(np.asarray(x)))

    return PhasePlan(
        gpus=gpus,
        tensor_parallel=tp,
        overlap=overlap,
        batch=batch,
        rate=c.prefill_rate if prefill else c.decode_rate,
        iteration=value(parts.total),
        attention=value(parts.attention),
        shared=value(parts.shared),
        exchange=value(parts.exchange),
        moe=value(parts.moe),
        host=value(parts.host),
        binds=_binds(problem, c, phase),
    )


def _iteration(problem: Problem, c: Candidate, phase: str, batch: int) -> Parts:
    moe, q, n = np.array([c.moe]), np.array([c.q]), np.array([float(batch)])
    if phase == "prefill":
        gpus = np.array([c.prefill])
        return problem.prefill_parts(n, gpus, moe, q, c.tp_prefill, c.prefill_overlap)
    gpus = np.array([c.decode])
    return problem.decode_parts(n, gpus, moe, q, c.tp_decode, c.decode_overlap)


def _binds(problem: Problem, c: Candidate, phase: str) -> str:
    """Why the batch of `phase` is not larger."""
    a, w = problem.latency.assumptions, problem.workload
    prefill = phase == "prefill"
    sources = (c.prefill // c.tp_prefill) if prefill else (c.decode // c.tp_decode)
    batch = c.prefill_batch if prefill else c.decode_batch
    rate = c.prefill_rate if prefill else c.decode_rate
    if rate >= sources / max(problem.kv_transfer, 1e-12) * 0.999:
        return "link: moving KV from prefill to decode"
    whole = w.mean_input + (0 if prefill else w.mean_output)
    tp = c.tp_prefill if prefill else c.tp_decode
    held = problem.memory.requests(tp, whole)
    slots = a.max_prefill_requests if prefill else a.decode_slots
    if batch >= sources * min(held, slots):
        if held <= slots:
            return f"KV: a server holds {held} requests of {whole:.0f} tokens"
        return f"slots: {slots} requests a server (assumption)"
    target = "TTFT" if prefill else "TPOT"
    parts = _iteration(problem, c, phase, batch)
    names = ("attention", "shared", "exchange", "moe", "host")
    longest = max(names, key=lambda n: float(np.squeeze(np.asarray(getattr(parts, n)))))
    label = {"exchange": "the links", "moe": "routed experts", "shared": "shared experts"}
    return f"{target}: a larger batch misses it; most of the time goes to " + label.get(
        longest, longest
    )


def _reasons(setting: Setting, c: Candidate, unit: int) -> list[str]:
    """Why this split: what holds each role's count up or down."""
    memory, reasons = setting.memory(), []
    fewer = c.moe - unit if setting.sharing is None else 0
    sources = (c.prefill / c.tp_prefill, c.decode / c.tp_decode)
    if fewer > 0 and not memory.moe_fits(*sources, fewer):
        need = float(memory.moe_server(*sources, fewer)) / 1e9
        reasons.append(
            f"fewer MoE servers do not fit: {fewer} would hold {need:.1f} of "
            f"{memory.usable / 1e9:.1f} GB each"
        )
    if not memory.moe_fits(sources[0] + unit, sources[1], c.moe):
        reasons.append("the buffers of one more prefill server do not fit on the MoE servers")
    slack = c.prefill_rate / c.decode_rate
    if slack >= 1:
        reasons.append(f"prefill could carry {slack:.2f}x what decode does")
    else:
        reasons.append(f"decode could carry {1 / slack:.2f}x what prefill does")
    return reasons


def _memory(setting: Setting, c: Candidate) -> list[MemoryUse]:
    memory, a = setting.memory(), setting.assumptions
    uses = []
    for role, tp in (("prefill", c.tp_prefill), ("decode", c.tp_decode)):
        weights = setting.model.attention_server_bytes / tp
        rest = memory.attention_usable - memory.attention_server(tp)
        uses.append(
            MemoryUse(role=role, weights=weights, buffers=0, reserve=a.graph_reserve, rest=rest)
        )
    weights = float(memory.experts(c.moe))
    buffers = float(memory.buffers(c.prefill / c.tp_prefill, c.decode / c.tp_decode, c.moe))
    rest = memory.usable - weights - buffers - a.runtime_reserve
    if setting.sharing:  # which attention servers on the same GPU take
        rest -= memory.attention_usable * setting.sharing.readers
    uses.append(
        MemoryUse(
            role="MoE", weights=weights, buffers=buffers, reserve=a.runtime_reserve, rest=rest
        )
    )
    return uses


def _next_best(
    problem: Problem, setting: Setting, gpus: int, placement: str, best: Candidate
) -> list[Candidate]:
    """The layouts after the best; at most 64 GPUs."""
    if gpus > 64:
        return []
    return [
        c for c in all_layouts(problem, setting.space(gpus, placement)) if c.layout != best.layout
    ]


def _one_more(setting: Setting, gpus: int, placement: str) -> list[tuple[str, str, float]]:
    """(what is added, best layout then, goodput then)."""
    if setting.sharing:
        if gpus >= min(setting.gpu.gpus_per_node, setting.model.experts):
            return []
        more = search_shared(setting._replace(sharing=None), gpus + 1)
        return [("one GPU, shared", c.layout, c.goodput) for _, c in more[:1]]
    node = setting.gpu.gpus_per_node
    steps = [("one GPU", gpus + 1, "free")]
    if gpus % node == 0:
        steps.append(("one node", gpus + node, placement))
    found = []
    for what, count, how in steps:
        best = search(setting.problem(count), setting.space(count, how))
        if best is not None:
            found.append((what, best.layout, best.goodput))
    return found
