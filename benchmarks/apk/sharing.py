"""Fig. 11/12: decode and prefill on one GPU: the persistent kernel against CUDA stream priority,
MPS and Green Context, in one run.

GLM-5.1 GateUp, 8 experts. Decode is launched 10 us after prefill. Two readings of the paper's
shapes: 8,192 and 128 rows per expert, or in total. Each way is compared with its own kernels alone
on the GPU ("exclusive"); the other ways run DeepGEMM's.
    python benchmarks/apk/sharing.py --json benchmarks/results/apk_sharing-h200.json
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

import mps
import torch
from common import arguments, report, row
from cuda.bindings import driver as cu
from fig13 import make_layers
from pair import (
    DELAY_US,
    EXPERTS,
    READINGS,
    Helpers,
    Reading,
    decode_peer,
    decode_template,
    prefill_peer,
    prefill_template,
    shape,
)

from vllm_expertplex.moe_server.apk import structs
from vllm_expertplex.moe_server.apk.buffers import LayerWeights, OperationTemplate
from vllm_expertplex.moe_server.apk.driver import check
from vllm_expertplex.moe_server.apk.kernel import PersistentKernel

BUDGETS = (32, 64, 88, 110, 132)  # of decode, in SMs
GREEN_SMS = (32, 64, 96)  # of decode


class Took(NamedTuple):
    """Microseconds of both phases, one way of running them."""

    way: str
    setting: str
    prefill: float
    decode: float


class Pair:
    """Prefill and decode of one experiment, with times taken on the device, for any two streams."""

    def __init__(self, helpers: Helpers) -> None:
        self.helpers = helpers
        self.times = torch.zeros(4, dtype=torch.int64, device="cuda")
        self.gate = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.gate.fill_(1)  # loads the kernel: a first use while streams wait would never return
        for name in ("delay", "stamp"):
            helpers.launch(name, 0 if name == "delay" else self.times.data_ptr(), 0)

    def run(self, prefill: tuple | None, decode: tuple | None) -> tuple[float, float]:
        """Each is (launch(stream), stream, context or None). Returns microseconds of prefill and
        decode.
        """
        self.gate.zero_()
        torch.cuda.synchronize()
        primary = check(cu.cuCtxGetCurrent(), "current context")
        at = self.times.data_ptr()
        for work, slot, wait in ((decode, 2, DELAY_US * 1000), (prefill, 0, 0)):
            if work is None:
                continue
            go, stream, context = work
            if context is not None:
                check(cu.cuCtxSetCurrent(context), "entering the green context")
            check(cu.cuStreamWaitValue32(stream, self.gate.data_ptr(), 1, 0), "gate")
            if wait:
                self.helpers.launch("delay", wait, stream)
            self.helpers.launch("stamp", at + 8 * slot, stream)
            go(stream)
            self.helpers.launch("stamp", at + 8 * slot + 8, stream)
            if context is not None:
                check(cu.cuCtxSetCurrent(primary), "leaving the green context")
        self.gate.fill_(1)
        torch.cuda.synchronize()
        t = self.times.tolist()
        return (t[1] - t[0]) / 1e3, (t[3] - t[2]) / 1e3

    def median(
        self, prefill: tuple | None, decode: tuple | None, n: int = 9
    ) -> tuple[float, float]:
        for work in (prefill, decode):
            if work is not None:  # loads the kernel, as above
                if work[2] is not None:
                    primary = check(cu.cuCtxGetCurrent(), "current context")
                    check(cu.cuCtxSetCurrent(work[2]), "entering the green context")
                work[0](work[1])
                if work[2] is not None:
                    check(cu.cuCtxSetCurrent(primary), "leaving the green context")
        torch.cuda.synchronize()
        runs = [self.run(prefill, decode) for _ in range(n + 2)][2:]
        return statistics.median(r[0] for r in runs), statistics.median(r[1] for r in runs)


def apk(
    kernel: PersistentKernel,
    prefill: OperationTemplate,
    decode: OperationTemplate,
    layers: list[LayerWeights],
    reading: Reading,
) -> list[Took]:
    """Exclusive and contended times by decode's budget in SMs."""
    x = EXPERTS * -(-reading.decode // 64)

    def once(p: bool, d: bool, q: int) -> tuple[float, float]:
        arrivals = []
        if p:
            arrivals.append(
                (0, structs.PREFILL, prefill.gemm_operation(0, 0, structs.GATE_UP, layer=0))
            )
        if d:
            arrivals.append(
                (
                    DELAY_US * 1000,
                    structs.DECODE,
                    decode.gemm_operation(1, len(arrivals), structs.GATE_UP, layer=1, x_moe=x),
                )
            )
        run = kernel.prepare(
            [prefill, decode], layers, arrivals, structs.Budget(q, 2 * kernel.clusters, x, 2)
        )
        results = [[(c - a) / 1e3 for a, _, c in run.run().operations] for _ in range(9)]
        used = [statistics.median(column) for column in zip(*results, strict=True)]
        return (used[0] if p else 0.0, used[-1] if d else 0.0)

    all_sms = 2 * kernel.clusters
    alone = once(True, False, all_sms)[0], once(False, True, all_sms)[1]
    found = [Took("APK", "exclusive", *alone)]
    return found + [Took("APK", f"q={q}", *once(True, True, q)) for q in BUDGETS]


def green_streams(sms: int) -> list[tuple[int, int, int]]:
    """(SMs, context, stream) of a group of `sms` and of what remains."""
    device = check(cu.cuDeviceGet(0), "device")
    kind = cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    everything = check(cu.cuDeviceGetDevResource(device, kind), "SM resource")
    groups, _, rest = check(cu.cuDevSmResourceSplitByCount(1, everything, 0, sms), "splitting SMs")
    made = []
    for resource in (groups[0], rest):
        description = check(cu.cuDevResourceGenerateDesc([resource], 1), "resource description")
        flag = cu.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        green = check(cu.cuGreenCtxCreate(description, device, flag), "green context")
        context = check(cu.cuCtxFromGreenCtx(green), "context")
        stream = check(
            cu.cuGreenCtxStreamCreate(green, cu.CUstream_flags.CU_STREAM_NON_BLOCKING, 0), "stream"
        )
        made.append((int(resource.sm.smCount), context, stream))
    return made


def others(
    pair: Pair,
    prefill: OperationTemplate,
    decode: OperationTemplate,
    layers: list[LayerWeights],
    reading: Reading,
) -> list[Took]:
    """DeepGEMM's kernels: alone, by stream priority, and on SMs of their own."""
    low, high = torch.cuda.Stream(priority=0), torch.cuda.Stream(priority=-5)
    first = prefill_peer(reading, prefill, layers[0]), low.cuda_stream, None
    second = decode_peer(reading, decode, layers[1]), high.cuda_stream, None
    p_work, d_work = (first[0].launch, *first[1:]), (second[0].launch, *second[1:])
    alone = pair.median(p_work, None)[0], pair.median(None, d_work)[1]
    found = [Took("DeepGEMM", "exclusive", *alone)]
    found.append(Took("stream priority", "", *pair.median(p_work, d_work)))
    for sms in GREEN_SMS:
        (ds, dc, dstream), (ps, pc, pstream) = green_streams(sms)
        a = prefill_peer(reading, prefill, layers[0], ps - ps % 2)
        b = decode_peer(reading, decode, layers[1], ds)
        took = pair.median((a.launch, pstream, pc), (b.launch, dstream, dc))
        found.append(Took("Green Context", f"{ds}+{ps} SMs", *took))
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--no-mps", action="store_true", help="where no MPS daemon can be started")
    args = parser.parse_args()
    kernel, layers = PersistentKernel(shape()), make_layers(shape(), 2)
    pair = Pair(Helpers())
    under_mps = {} if args.no_mps else mps.measure()
    out = []
    for n, reading in enumerate(READINGS):
        prefill, decode = prefill_template(reading), decode_template(reading)
        found = apk(kernel, prefill, decode, layers, reading)
        found += others(pair, prefill, decode, layers, reading)
        found += [Took("MPS", setting, *took[n]) for setting, took in under_mps.items()]
        alone = {t.way: t for t in found if t.setting == "exclusive"}
        for t in found:
            base = alone["APK" if t.way == "APK" else "DeepGEMM"]
            name = f"{reading.name}: {t.way} {t.setting}".strip()
            for phase in ("decode", "prefill"):
                ours, theirs = getattr(t, phase), getattr(base, phase)
                out.append(row(f"{name}: {phase}", "us", ours, theirs, "exclusive, same kernels"))
    report("apk_sharing", out, args.json)


if __name__ == "__main__":
    main()
