"""A plan as tables for a terminal. Owns: wording and layout only."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_expertplex.planner.assumptions import REASONS
from vllm_expertplex.planner.plan import Plan
from vllm_expertplex.planner.sharing import sms_of

MS = 1e3


def print_plan(plan: Plan, console: Console, assumptions: bool = True) -> None:
    """Answer first, then why, memory, alternatives, and what it all rests on."""
    if plan.copies > 1:
        console.print(
            f"[bold]{plan.copies} deployments[/] of {plan.gpus} GPUs each, together "
            f"[bold]{plan.copies * plan.goodput:.3g} requests/s[/]; one of them:"
        )
    console.print(
        f"[bold]{plan.layout}[/]  for {escape(plan.model)} on {plan.gpus} x {plan.gpu}, load "
        f"{escape(plan.workload)}, TTFT {plan.ttft:g} s, TPOT {plan.tpot:g} s"
    )
    moe_sms = sms_of(plan.moe_sm_percent or 100, plan.gpu_sms)
    console.print(
        f"predicted goodput [bold]{plan.goodput:.3g} requests/s[/] (model, not measured); decode "
        f"has {plan.decode_sms} of {moe_sms} SMs of MoE servers under contention; "
        f"{plan.limited_by} is the limit"
    )
    if plan.moe_sm_percent:
        console.print(_shared(plan, moe_sms))
    for reason in plan.reasons:
        console.print(f"- {reason}")
    console.print(f"- prefill is bound by {plan.prefill.binds}")
    console.print(f"- decode is bound by {plan.decode.binds}")
    console.print(_phases(plan))
    console.print(_memory(plan))
    console.print(_alternatives(plan))
    if assumptions:
        console.print(_assumptions(plan))
    for what, source in plan.sources.items():
        console.print(f"[dim]{what}: {escape(source)}[/]")


def _shared(plan: Plan, moe_sms: int) -> str:
    text = (
        f"servers share every GPU: [bold]moe_sm_percent {plan.moe_sm_percent}[/], MoE servers "
        f"hold {moe_sms} of its {plan.gpu_sms} SMs"
    )
    if plan.prefill_sm_percent:
        text += (
            f", and [bold]prefill_sm_percent {plan.prefill_sm_percent}[/] of the others is for "
            "prefill beside decode"
        )
    return text


def _phases(plan: Plan) -> Table:
    table = Table(title="One iteration of each phase")
    for name in ("", "prefill", "decode"):
        table.add_column(name, justify="left" if not name else "right", overflow="fold")
    pair = (plan.prefill, plan.decode)
    table.add_row("GPUs", *(str(p.gpus) for p in pair))
    table.add_row("tensor parallel", *(str(p.tensor_parallel) for p in pair))
    table.add_row("overlap", *(p.overlap for p in pair))
    table.add_row("batch (requests)", *(str(p.batch) for p in pair))
    table.add_row("iteration (ms)", *(f"{p.iteration * MS:.1f}" for p in pair))
    for name in ("attention", "shared", "exchange", "moe", "host"):
        table.add_row(f"  {name}", *(f"{getattr(p, name) * MS:.1f}" for p in pair))
    table.add_row("rate (req/s)", *(f"{p.rate:.3g}" for p in pair))
    return table


def _memory(plan: Plan) -> Table:
    shared = " (one GPU has a MoE server and up to one of each other)"
    title = "Memory of the fullest GPU of each role (GB)"
    table = Table(title=title + (shared if plan.moe_sm_percent else ""))
    for name in ("role", "weights", "APK buffers", "reserve", "KV cache / free"):
        table.add_column(name, justify="right", overflow="fold")
    for m in plan.memory:
        table.add_row(
            m.role, *(f"{b / 1e9:.1f}" for b in (m.weights, m.buffers, m.reserve, m.rest))
        )
    return table


def _alternatives(plan: Plan) -> Table:
    table = Table(title="Alternatives")
    for name in ("", "layout", "req/s", "against the plan", "limit"):
        table.add_column(name, justify="right", overflow="fold")
    for i, (layout, goodput, limit) in enumerate(plan.next_best, start=2):
        table.add_row(f"{i}.", layout, f"{goodput:.3g}", f"{goodput / plan.goodput:.2f}x", limit)
    for what, layout, goodput in plan.one_more:
        table.add_row(f"+ {what}", layout, f"{goodput:.3g}", f"{goodput / plan.goodput:.2f}x", "")
    return table


def _assumptions(plan: Plan) -> Table:
    table = Table(title="Assumptions (change with --set NAME=VALUE)")
    for name in ("name", "value", "what it is, and why"):
        table.add_column(name, overflow="fold")
    for name, value in plan.assumptions.items():
        mark = " [bold](changed)[/]" if name in plan.changed_assumptions else ""
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        table.add_row(name, shown + mark, REASONS[name])
    return table
