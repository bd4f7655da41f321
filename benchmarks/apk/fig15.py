"""Fig. 15: how long a cluster runs between two points at which it can be preempted, for each of
the six stages, and
how long decode then waits: from the urgent word to its first tile, and to the first tile of the
last cluster it is
given. M2.7 shapes, 8 experts, every token routed to all of them.
    python benchmarks/apk/fig15.py --json benchmarks/results/apk_fig15-h200.json
"""

from __future__ import annotations

import statistics
from collections import defaultdict

import torch
from common import MODELS, arguments, percentile, report, row
from fig13 import make_layers

from vllm_expertplex.moe_server.apk import structs
from vllm_expertplex.moe_server.apk.buffers import OperationTemplate
from vllm_expertplex.moe_server.apk.jit import KernelShape
from vllm_expertplex.moe_server.apk.kernel import PersistentKernel, TileTime

PAPER_US = 25.3  # largest interval of the paper; its GEMMs: 10.7


def fill(op: OperationTemplate, tokens: int) -> None:
    op.tokens[:tokens] = torch.randn(tokens, op.shape.hidden, device="cuda").to(op.tokens.dtype)
    op.token_scales.fill_(0.01)
    ids = torch.arange(op.shape.top_k, device="cuda", dtype=torch.int32)
    op.expert_ids[:tokens] = ids.expand(tokens, -1)
    op.expert_weights.fill_(0.125)
    op.set_tokens(tokens)


def intervals(kernel: PersistentKernel, layers: list, tokens: int, rows: list[dict]) -> None:
    op = OperationTemplate(kernel.shape, tokens, True, kernel.device)
    fill(op, tokens)
    run = kernel.prepare([op], layers, [(0, structs.PREFILL, op.operation(0, 0))], trace=4096)
    between, whole = defaultdict(list), defaultdict(list)
    for _ in range(5):
        latest: dict[int, TileTime] = {}
        for t in sorted(run.run().tiles, key=lambda t: t.began):
            whole[t.stage].append((t.ended - t.began) / 1e3)
            before = latest.get(t.cluster)
            if before is not None and before.stage == t.stage:
                between[t.stage].append((t.began - before.began) / 1e3)
            latest[t.cluster] = t
    for stage, name in enumerate(structs.STAGES):
        # One tile per cluster has no two boundaries: its time to publication bounds the interval.
        times = between[stage] or whole[stage]
        if not times:  # a small operation has no counting stage
            continue
        r = row(
            f"{name}, {tokens} rows per expert: p99",
            "us",
            percentile(times, 99),
            PAPER_US,
            "paper, all stages",
        )
        r |= {
            "median": statistics.median(times),
            "max": max(times),
            "intervals": len(between[stage]),
        }
        r |= {"tile_to_publication_p99": percentile(whole[stage], 99)}
        rows.append(r)


def waits(
    kernel: PersistentKernel, layers: list, tokens: int, arrivals: int, rows: list[dict]
) -> None:
    """Decode (64 tokens, half the SMs) arrives while a prefill operation runs."""
    prefill = OperationTemplate(kernel.shape, tokens, True, kernel.device)
    decode = OperationTemplate(kernel.shape, 64, False, kernel.device)
    fill(prefill, tokens)
    fill(decode, 64)
    budget = structs.Budget(2 * (kernel.clusters // 2), 2 * kernel.clusters, 8, 2)
    alone = kernel.prepare(
        [decode], layers, [(0, structs.DECODE, decode.operation(0, 0, x_moe=8))], budget
    )
    t = [x[2] - x[0] for x in (alone.run().operations[0] for _ in range(9))]
    alone_us = statistics.median(t) / 1e3
    base = kernel.prepare(
        [prefill], layers, [(0, structs.PREFILL, prefill.operation(0, 0))], budget
    )
    span = statistics.median([x[2] - x[0] for x in (base.run().operations[0] for _ in range(5))])
    first, last, total, slow = [], [], [], []
    for n in range(arrivals):
        at = int(span * (0.05 + 0.85 * n / arrivals))
        ops = [
            (0, structs.PREFILL, prefill.operation(0, 0, layer=0)),
            (at, structs.DECODE, decode.operation(1, 1, layer=1, x_moe=8)),
        ]
        run = kernel.prepare([prefill, decode], layers, ops, budget, hold_ns=20_000, trace=4096)
        times = run.run()
        submitted, _, done = times.operations[1]
        began: dict[int, int] = {}
        for t2 in times.tiles:
            if t2.phase == structs.DECODE:
                began[t2.cluster] = min(began.get(t2.cluster, 1 << 62), t2.began)
        share = sorted(v - submitted for c, v in began.items() if c < kernel.clusters // 2)
        first.append(min(share) / 1e3)
        last.append(max(share) / 1e3)
        total.append((done - submitted) / 1e3)
        slow.append((times.operations[0][2] - times.operations[0][0]) / 1e3)
    rows.append(
        row(
            f"urgent word to first decode tile, prefill {tokens} rows per expert, p50",
            "us",
            percentile(first, 50),
        )
    )
    rows.append(
        row(
            f"urgent word to first decode tile, prefill {tokens} rows per expert, p99",
            "us",
            percentile(first, 99),
        )
    )
    rows.append(
        row(
            f"urgent word to last cluster's first decode tile, {tokens}, p50",
            "us",
            percentile(last, 50),
        )
    )
    rows.append(
        row(
            f"decode operation beside prefill {tokens}, p50",
            "us",
            percentile(total, 50),
            alone_us,
            "alone",
        )
    )
    rows.append(
        row(
            f"prefill operation of {tokens} with one decode operation inside",
            "us",
            statistics.median(slow),
            span / 1e3,
            "alone",
        )
    )


def main() -> None:
    args = arguments(__doc__).parse_args()
    h, i = MODELS["M2.7"]
    shape = KernelShape(h, i, experts=8, top_k=8)
    kernel, layers = PersistentKernel(shape), make_layers(shape, 2)
    rows: list[dict] = []
    for tokens in (128, 512, 2048):
        intervals(kernel, layers, tokens, rows)
    for tokens in (512, 2048):
        waits(kernel, layers, tokens, 40, rows)
    report("apk_fig15", rows, args.json)


if __name__ == "__main__":
    main()
