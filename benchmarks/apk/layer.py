"""The whole MoE layer: all six stages in the persistent kernel, where its time goes, and a bound
on any unfused path.

The peer is DeepGEMM's two grouped GEMMs alone, back to back in a CUDA graph, without the permute,
activation and
unpermute kernels that an unfused path adds: a lower bound on such a path.
    python benchmarks/apk/layer.py --json benchmarks/results/apk_layer-h200.json
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
from common import FP8_TFLOPS, HBM_TBPS, MODELS, graph_us, random_scales, report, row
from deepgemm import Config
from fig13 import make_layers, peer
from fig15 import fill

from vllm_expertplex.moe_server.apk import structs
from vllm_expertplex.moe_server.apk.buffers import OperationTemplate
from vllm_expertplex.moe_server.apk.jit import KernelShape
from vllm_expertplex.moe_server.apk.kernel import PersistentKernel


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    h, i = MODELS["M2.7"]
    shape = KernelShape(h, i, experts=8, top_k=8)
    kernel, layers = PersistentKernel(shape), make_layers(shape, 4)
    rows: list[dict] = []
    for tokens, wide in ((16, False), (64, False), (512, True), (2048, True), (4096, True)):
        op = OperationTemplate(shape, tokens, wide, kernel.device)
        fill(op, tokens)
        phase = structs.PREFILL if wide else structs.DECODE
        runs = [
            kernel.prepare(
                [op], layers, [(0, phase, op.operation(0, 0, layer=n, x_moe=8))], trace=4096
            )
            for n in range(4)
        ]
        results = [r.run() for r in runs * 3]
        inside = statistics.median((r.operations[0][2] - r.operations[0][0]) / 1e3 for r in results)
        spans = {}
        for stage in range(6):
            tiles = [[t for t in r.tiles if t.stage == stage] for r in results]
            if not tiles[0]:  # a small operation has no counting stage
                continue
            begin = statistics.median(
                (min(t.began for t in ts) - r.operations[0][0]) / 1e3
                for ts, r in zip(tiles, results, strict=True)
            )
            end = statistics.median(
                (max(t.ended for t in ts) - r.operations[0][0]) / 1e3
                for ts, r in zip(tiles, results, strict=True)
            )
            spans[structs.STAGES[stage]] = (begin, end)
        capacity = -(-tokens // 128) * 128
        launches = []
        for n in range(4):
            for g, (n_, k_) in enumerate(((2 * i, h), (h, i))):
                a = torch.empty(8 * capacity, k_, dtype=torch.float8_e4m3fn, device="cuda")
                a.view(torch.uint8).random_(0, 120)
                out = torch.empty(8 * capacity, n_, dtype=torch.bfloat16, device="cuda")
                weights = layers[n].weights[g].view(-1, k_), layers[n].scales[g]
                if wide:
                    layout = torch.arange(8, device="cuda", dtype=torch.int32).repeat_interleave(
                        capacity
                    )
                    config = Config(n_, k_, 8, False, 128, 192, 4, 2)
                    sfa, m = random_scales(k_ // 128, 8 * capacity), 8 * capacity
                else:
                    layout = torch.full((8,), tokens, device="cuda", dtype=torch.int32)
                    config = Config(n_, k_, 8, True, 64, 128, 8, 1)
                    sfa, m = random_scales(8 * k_ // 128, capacity), capacity
                launches.append(
                    peer(config).bind(a, sfa, weights[0], weights[1], out, layout, m).launch
                )

        def work(launches: list = launches) -> None:
            for go in launches:
                go()

        theirs = graph_us(work, repeats=1) / 4
        floor = max(6.0 * 8 * tokens * h * i / FP8_TFLOPS / 1e6, 8 * 3 * h * i / HBM_TBPS / 1e6)
        r = row(
            f"M2.7 layer, 8 experts, {tokens} tokens, {'prefill' if wide else 'decode'}",
            "us",
            inside,
            theirs,
            "DeepGEMM, two GEMMs only",
            floor,
        )
        r["stages"] = spans
        rows.append(r)
        print(
            r["name"],
            " ".join(f"{n.split(':')[-1].strip()} {b:.1f}-{e:.1f}" for n, (b, e) in spans.items()),
            flush=True,
        )
    report("apk_layer", rows, args.json)


if __name__ == "__main__":
    main()
