"""How fast decode reads experts with a share of the SMs, as when attention has the others.

One MoE layer of M2.7, half of its 256 experts on this GPU, random routing over all of them: a whole
operation in the kernel, from its submission to its done stamp. The peer is the same kernel with
decode tiles of half the columns (`KernelShape(decode_n=64)`). Both must answer alike.
    python benchmarks/apk/decode_sms.py --json benchmarks/results/apk_decode_sms-h200.json
"""

from __future__ import annotations

import torch
from common import HBM_TBPS, MODELS, arguments, inside_us, report, row
from fig13 import make_layers
from fig15 import fill
from rich.progress import track

from vllm_expertplex.moe_server.apk import structs
from vllm_expertplex.moe_server.apk.buffers import LayerWeights, OperationTemplate
from vllm_expertplex.moe_server.apk.jit import KernelShape
from vllm_expertplex.moe_server.apk.kernel import PersistentKernel

EXPERTS, HELD, TOP_K = 256, 128, 8
COLUMNS = (128, 64)  # ours, the peer's
CLUSTERS = (66, 49, 39, 33, 26)  # of two SMs: all of an H200's, and 75, 60, 50 and 40 %
TOKENS = (8, 16, 32, 64, 128)
APART = 1e-5  # results are bf16 sums of the same products


def spread(op: OperationTemplate, tokens: int) -> int:
    """The same operands for any kernel; returns how many of its experts they reach."""
    torch.manual_seed(tokens)
    fill(op, tokens)
    chosen = [torch.randperm(EXPERTS, device="cuda")[:TOP_K] for _ in range(tokens)]
    ids = torch.stack(chosen).int() - (EXPERTS - HELD)  # negative: elsewhere
    op.expert_ids.copy_(ids)
    return int(ids[ids >= 0].unique().numel())


def measure(
    kernel: PersistentKernel, layers: list[LayerWeights], tokens: int
) -> tuple[float, int, torch.Tensor]:
    """Microseconds of an operation, experts it reads, its result [tokens, hidden]."""
    op = OperationTemplate(kernel.shape, tokens, False, kernel.device)
    active = spread(op, tokens)
    runs = [
        kernel.prepare(
            [op], layers, [(0, structs.DECODE, op.operation(0, 0, layer=n, x_moe=active))]
        )
        for n in range(len(layers))
    ]
    results = [r.run() for r in runs * 5][len(runs) :]
    return inside_us(results), active, op.result.float().clone()


def main() -> None:
    args = arguments(__doc__).parse_args()
    h, i = MODELS["M2.7"]
    shapes = [KernelShape(h, i, HELD, TOP_K, decode_n=n) for n in COLUMNS]
    layers = make_layers(shapes[0], 2)
    rows: list[dict] = []
    for clusters in track(CLUSTERS, "SMs"):
        kernels = [PersistentKernel(shape, clusters=clusters) for shape in shapes]
        for tokens in TOKENS:
            (us, active, result), (peer, _, want) = (measure(k, layers, tokens) for k in kernels)
            apart = float((result - want).norm() / want.norm())
            if not apart <= APART:
                raise RuntimeError(f"{2 * clusters} SMs, {tokens} tokens: {apart:.1e} apart")
            size = active * 3 * h * i
            r = row(
                f"{2 * clusters} SMs, {tokens} tokens, {active} experts",
                "us",
                us,
                peer,
                f"{COLUMNS[1]} columns a warpgroup",
                size / HBM_TBPS / 1e6,
            )
            rows.append(r | {"tbps": size / us / 1e6, "peer_tbps": size / peer / 1e6})
    report("apk_decode_sms", rows, args.json)


if __name__ == "__main__":
    main()
