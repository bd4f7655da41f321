"""The resident kernel's latency: from an attention server's ready word to the done word it sees.

M2.7 layer, all six stages. A client kernel on the same GPU plays the attention servers, one
operation in flight each. The peer is the same operation in a finite run, from submission to the
done stamp inside the kernel: the difference is noticing the ready word and publishing the done
word.
    python benchmarks/apk/resident.py --json benchmarks/results/apk_resident-h200.json
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import torch
from common import HBM_TBPS, MODELS, arguments, percentile, report, row
from fig13 import make_layers

# The client that the GPU tests use.
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "gpu"))
from client import Clients, Expected, Source, pack, resident, slot_layout
from fig15 import fill

from vllm_expertplex.moe_server.apk import structs
from vllm_expertplex.moe_server.apk.buffers import OperationTemplate
from vllm_expertplex.moe_server.apk.jit import KernelShape
from vllm_expertplex.moe_server.apk.kernel import PersistentKernel
from vllm_expertplex.moe_server.apk.resident import ResidentRun

LAYERS = 4
CAPACITY = 2048


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--operations", type=int, default=500, help="per row and source")
    args = parser.parse_args()
    h, i = MODELS["M2.7"]
    shape = KernelShape(h, i, experts=8, top_k=8)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    kernel, layers = PersistentKernel(shape, clusters=sms // 2 - 1), make_layers(shape, LAYERS)
    clients = Clients()
    clients.warm_up()
    op = OperationTemplate(shape, CAPACITY, False, kernel.device)
    fill(op, CAPACITY)
    layout = slot_layout(shape, CAPACITY)
    inputs = pack(op, layout).unsqueeze(0)
    results = op.result.view(1, 1, 1, CAPACITY, h).expand(1, LAYERS, 2, -1, -1)
    expected = Expected(inputs, results)
    sources = [Source(shape, CAPACITY, n) for n in range(4)]
    rows: list[dict] = []

    def finite(tokens: int, phase: int) -> float:
        op.wide = phase == structs.PREFILL
        op.set_tokens(tokens)
        runs = [
            kernel.prepare([op], layers, [(0, phase, op.operation(0, 0, n))]) for n in range(LAYERS)
        ]
        times = [r.run().operations[0] for r in runs * 5]
        return statistics.median((t[2] - t[0]) / 1e3 for t in times)

    def served(most: list[tuple[int, int]]) -> tuple[dict[int, list[float]], ResidentRun]:
        """Latencies in us by phase."""
        run = ResidentRun(kernel, [s.served for s in sources], layers, max_ms=20_000)
        counts = [args.operations] * len(most)
        clients.prepare(
            sources[: len(most)], most, expected, counts, check=False, fixed=True, gap_ns=20_000
        )
        with resident(run):
            for done, _, late in clients.run():
                if late:
                    raise RuntimeError(f"an operation timed out after {done} others")
        took = [t / 1e3 for t in clients.took.tolist()]
        phases = [(k >> 31) & 1 for k in clients.kind.tolist()]
        return {p: [t for t, q in zip(took, phases, strict=True) if p == q] for p in (0, 1)}, run

    for tokens, phase in ((1, 0), (16, 0), (64, 0), (512, 1), (2048, 1)):
        alone = finite(tokens, phase)
        most = [(tokens, 0)] if phase == 0 else [(0, tokens)]
        times = served(most)[0][phase]
        floor = 8 * 3 * h * i / HBM_TBPS / 1e6
        name = f"{tokens} tokens, {'prefill' if phase else 'decode'}: ready to done"
        r = row(f"{name}, median", "us", statistics.median(times), alone, "finite run", floor)
        rows.append(r | {"p99": percentile(times, 99), "operations": len(times)})
        print(r["name"], f"{r['ours']:.1f} us, p99 {percentile(times, 99):.1f}", flush=True)
    alone = statistics.median(served([(64, 0)])[0][0])
    for others in (1, 2, 3):
        times = served([(64, 0)] * (1 + others))[0][0]
        name = f"64 tokens, decode, beside {others} more decode servers, median"
        rows.append(row(name, "us", statistics.median(times), alone, "one decode server"))
    times, run = served([(64, 0), (0, 2048)])
    name = "64 tokens, decode, beside prefill of 2,048 tokens"
    for kind, value in (
        ("median", statistics.median(times[0])),
        ("p99", percentile(times[0], 99)),
    ):
        rows.append(row(f"{name}, {kind}", "us", value, alone, "one decode server"))
    print(run.tallies())
    report("apk_resident", rows, args.json)


if __name__ == "__main__":
    main()
