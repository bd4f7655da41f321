"""The whole MoE layer: all six stages in the persistent kernel, where its time goes, and the same
layer as a chain of kernels in a CUDA graph.

The peer is the faster of vLLM's two experts (`unfused.py`), which both answer as ours does but for
rounding. DeepGEMM's two grouped GEMMs alone are a lower bound on any such chain. Weights rotate
over four layers.
    python benchmarks/apk/layer.py --json benchmarks/results/apk_layer-h200.json
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from common import (
    FP8_TFLOPS,
    HBM_TBPS,
    MODELS,
    arguments,
    graph_us,
    inside_us,
    random_scales,
    report,
    row,
)
from deepgemm import Config
from fig13 import make_layers, peer
from fig15 import fill
from unfused import EXPERTS, chain

from vllm_expertplex.moe_server.apk import structs
from vllm_expertplex.moe_server.apk.buffers import LayerWeights, OperationTemplate
from vllm_expertplex.moe_server.apk.jit import KernelShape
from vllm_expertplex.moe_server.apk.kernel import PersistentKernel, RunTimes

LAYERS = 4
MOST_APART = 0.05  # of two results whose activations were rounded to FP8 with other scales


def spans(results: list[RunTimes]) -> dict[str, tuple[float, float]]:
    """First claim and last publication of each stage, microseconds after submission."""
    found = {}
    for stage, name in enumerate(structs.STAGES):
        tiles = [[t for t in r.tiles if t.stage == stage] for r in results]
        if not tiles[0]:  # a small operation has no counting stage
            continue
        begin, end = (
            statistics.median(
                (pick(getattr(t, at) for t in ts) - r.operations[0][0]) / 1e3
                for ts, r in zip(tiles, results, strict=True)
            )
            for pick, at in ((min, "began"), (max, "ended"))
        )
        found[name] = begin, end
    return found


def gemms_alone(op: OperationTemplate, layers: list[LayerWeights]) -> float:
    """Microseconds of DeepGEMM's two GEMMs of one layer."""
    h, i, tokens = op.shape.hidden, op.shape.intermediate, op.n_tokens
    capacity = -(-tokens // 128) * 128
    launches: list[Callable[[], None]] = []
    for layer in layers:
        for g, (n, k) in enumerate(((2 * i, h), (h, i))):
            a = torch.empty(8 * capacity, k, dtype=torch.float8_e4m3fn, device="cuda")
            a.view(torch.uint8).random_(0, 120)
            out = torch.empty(8 * capacity, n, dtype=torch.bfloat16, device="cuda")
            if op.wide:
                layout = torch.arange(8, device="cuda", dtype=torch.int32)
                layout = layout.repeat_interleave(capacity)
                config = Config(n, k, 8, False, 128, 192, 4, 2)
                sfa, m = random_scales(k // 128, 8 * capacity), 8 * capacity
            else:
                layout = torch.full((8,), tokens, device="cuda", dtype=torch.int32)
                config = Config(n, k, 8, True, 64, 128, 8, 1)
                sfa, m = random_scales(8 * k // 128, capacity), capacity
            scales = layer.scales[g]
            assert scales is not None
            bound = peer(config).bind(a, sfa, layer.weights[g].view(-1, k), scales, out, layout, m)
            launches.append(bound.launch)

    def work() -> None:
        for go in launches:
            go()

    return graph_us(work, repeats=1) / len(layers)


def unfused(op: OperationTemplate, layers: list[LayerWeights]) -> dict[str, float]:
    """Microseconds of one layer, by vLLM's experts. `op.result` is the last layer's. Raises
    RuntimeError where one answers otherwise.
    """
    found, want = {}, op.result[: op.n_tokens].double()
    for name, experts in EXPERTS.items():
        work, result = chain(experts, op, layers)
        found[name] = graph_us(work, repeats=1) / len(layers)
        apart = float((result.double() - want).norm() / want.norm())
        if not apart < MOST_APART:
            raise RuntimeError(f"{name}, {op.n_tokens} tokens: {apart:.3f} apart from ours")
        print(f"{name}, {op.n_tokens} tokens: {found[name]:.1f} us, {apart:.1e} apart", flush=True)
    return found


def main() -> None:
    args = arguments(__doc__).parse_args()
    h, i = MODELS["M2.7"]
    shape = KernelShape(h, i, experts=8, top_k=8)
    kernel, layers = PersistentKernel(shape), make_layers(shape, LAYERS)
    rows: list[dict] = []
    for tokens, wide in ((16, False), (64, False), (512, True), (2048, True), (4096, True)):
        op = OperationTemplate(shape, tokens, wide, kernel.device)
        fill(op, tokens)
        phase = structs.PREFILL if wide else structs.DECODE
        runs = [
            kernel.prepare(
                [op], layers, [(0, phase, op.operation(0, 0, layer=n, x_moe=8))], trace=4096
            )
            for n in range(LAYERS)
        ]
        results = [r.run() for r in runs * 3]  # the last layer's last
        inside = inside_us(results)
        chains = unfused(op, layers)
        fastest = min(chains, key=lambda name: chains[name])
        floor = max(6.0 * 8 * tokens * h * i / FP8_TFLOPS / 1e6, 8 * 3 * h * i / HBM_TBPS / 1e6)
        r = row(
            f"M2.7 layer, 8 experts, {tokens} tokens, {'prefill' if wide else 'decode'}",
            "us",
            inside,
            chains[fastest],
            fastest,
            floor,
        )
        r |= {"stages": spans(results), "unfused": chains, "gemms_alone": gemms_alone(op, layers)}
        rows.append(r)
        print(
            r["name"],
            " ".join(f"{n} {b:.1f}-{e:.1f}" for n, (b, e) in r["stages"].items()),
            f"; DeepGEMM, two GEMMs only {r['gemms_alone']:.1f}",
            flush=True,
        )
    report("apk_layer", rows, args.json)


if __name__ == "__main__":
    main()
