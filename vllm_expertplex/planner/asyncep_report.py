"""AsyncEP plans as a table for a terminal. Owns: wording and layout only."""

from collections.abc import Callable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_expertplex.planner.asyncep import AsyncEPPlan, Comparison
from vllm_expertplex.planner.setup import Setting


def print_comparison(found: Comparison, setting: Setting, gpus: int, console: Console) -> None:
    """Answer first, then why, then every division of the GPUs."""
    best = found.plans[0]
    model, load = escape(setting.model.name), escape(setting.workload.name)
    console.print(
        f"[bold]{best.copies} x {best.gpus} GPUs[/]  AsyncEP for {model} on {gpus} x "
        f"{setting.gpu.name}, load {load}, TTFT {setting.targets.ttft:g} s"
    )
    console.print(
        f"predicted goodput [bold]{best.goodput:.3g} requests/s[/] (model, not measured); "
        f"{found.verdict}"
    )
    for reason in best.reasons:
        console.print(f"- {reason}")
    options = f"--asyncep-gpus {best.gpus} --max-num-batched-tokens {best.step_tokens}"
    if best.offload_layers:
        options += f", offload_layers = {best.offload_layers} in --asyncep-config"
    console.print(f"- serve each with: vllm serve ... --executor asyncep {options}")
    table = Table(title="Divisions of the GPUs (predicted)")
    table.add_column("", overflow="fold")
    for plan in found.plans:
        table.add_column(f"{plan.copies} x {plan.gpus} GPUs", justify="right", overflow="fold")
    for name, value in _ROWS.items():
        table.add_row(name, *(value(plan) for plan in found.plans))
    console.print(table)
    if found.expertplex is not None:
        console.print(
            f"ExpertPlex {found.expertplex_layout}: {found.expertplex:.3g} requests/s (predicted)"
        )


_ROWS: dict[str, Callable[[AsyncEPPlan], str]] = {
    "requests/s": lambda p: f"{p.goodput:.3g}",
    "experts in host memory": lambda p: "yes" if p.offload_layers else "no",
    "gather of a layer (ms)": lambda p: f"{p.layer_s * 1e3:.2f}",
    "T (tokens)": lambda p: str(p.threshold_tokens),
    "a step (tokens)": lambda p: str(p.step_tokens),
    "a step (ms)": lambda p: f"{p.step_s * 1e3:.0f}",
    "MFU": lambda p: f"{p.mfu:.1%}",
    "resident on a GPU (GB)": lambda p: f"{p.resident_bytes / 1e9:.0f}",
    "KV cache (tokens)": lambda p: str(p.kv_tokens),
}
