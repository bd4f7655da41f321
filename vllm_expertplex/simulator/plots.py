"""SLO curves as a picture. Owns: drawing; needs matplotlib. Must not know: how runs are made."""

from pathlib import Path

from vllm_expertplex.simulator.metrics import Summary


def slo_curves(
    curves: dict[str, list[Summary]], path: str, title: str, per: float = 1.0, unit: str = "req/s"
) -> None:
    """Part of requests within their targets over the rate, one line per mode.

    per: rates are divided by it (nodes). Raises ValueError when matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError:
        raise ValueError(
            "plots need matplotlib; install it with `pip install vllm-expertplex[plan]`"
        ) from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6))
    for mode, runs in curves.items():
        ordered = sorted(runs, key=lambda r: r.rate)
        axes.plot(
            [r.rate / per for r in ordered],
            [100 * r.attained for r in ordered],
            marker="o",
            markersize=3,
            label=mode,
        )
    axes.axhline(90, color="grey", linewidth=0.8, linestyle="--")
    axes.set(xlabel=f"request rate ({unit})", ylabel="within targets (%)", ylim=(0, 102))
    axes.set_title(f"{title} (simulated)", fontsize=10)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(Path(path), dpi=110)
    plt.close(figure)
