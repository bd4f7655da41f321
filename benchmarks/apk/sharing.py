"""Fig. 11/12: decode and prefill on one GPU: the persistent kernel against CUDA stream priority
and Green Context.

GLM-5.1 GateUp, 8 experts. Decode is launched 10 us after prefill. Two readings of the paper's
shapes: 8,192 and 128
rows per expert, or in total. Each way is compared with its own kernels alone on the GPU
("exclusive").
    python benchmarks/apk/sharing.py --json benchmarks/results/apk_sharing-h200.json
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
from pathlib import Path

import torch
from common import MODELS, random_scales, report, row
from cuda.bindings import driver as cu
from deepgemm import Config, DeepGemm
from fig13 import fill, make_layers, peer

from vllm_expertplex.moe_server.apk import structs
from vllm_expertplex.moe_server.apk.buffers import LayerWeights, OperationTemplate
from vllm_expertplex.moe_server.apk.driver import check
from vllm_expertplex.moe_server.apk.jit import KernelShape, Toolchain, cache_dir
from vllm_expertplex.moe_server.apk.kernel import PersistentKernel

_HELPERS = """
extern "C" __global__ void stamp(unsigned long long* t) { asm volatile("mov.u64 %0, %%globaltimer;"
: "=l"(*t)); }
extern "C" __global__ void delay(unsigned long long ns) {
  unsigned long long a, b; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(a));
  do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(b)); while (b - a < ns); }
"""
DELAY_US = 10


class Helpers:
    """Kernels that note the time and wait, usable from any context of the device."""

    def __init__(self) -> None:
        cubin = cache_dir() / "sharing-helpers.cubin"
        if not cubin.exists():
            cubin.with_suffix(".cu").write_text(_HELPERS)
            command = [
                Toolchain.find().nvcc,
                "-cubin",
                "-arch=sm_90",
                str(cubin.with_suffix(".cu")),
                "-o",
                str(cubin),
            ]
            subprocess.run(command, check=True)
        library = check(
            cu.cuLibraryLoadData(cubin.read_bytes(), [], [], 0, [], [], 0), "loading helpers"
        )
        self._kernels = {
            n: check(cu.cuLibraryGetKernel(library, n.encode()), n) for n in ("stamp", "delay")
        }

    def launch(self, name: str, value: int, stream: int) -> None:
        argument = ctypes.c_uint64(value)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        kernel = cu.CUfunction(int(self._kernels[name]))
        check(
            cu.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, ctypes.addressof(pointers), 0),
            name,
        )


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
    templates: list[OperationTemplate],
    layers: list[LayerWeights],
    budgets: list[int],
) -> dict:
    """Exclusive and contended times by decode's budget in SMs."""
    prefill, decode = templates
    x = sum(-(-r // 64) for r in [decode.rows_per_expert] * 8)

    def once(p: bool, d: bool, q: int) -> tuple[float, float]:
        arrivals, used = [], []
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
            templates, layers, arrivals, structs.Budget(q, 2 * kernel.clusters, x, 2)
        )
        results = [[(c - a) / 1e3 for a, _, c in run.run().operations] for _ in range(9)]
        used = [statistics.median(column) for column in zip(*results, strict=True)]
        return (used[0] if p else 0.0, used[-1] if d else 0.0)

    all_sms = 2 * kernel.clusters
    out = {"exclusive": (once(True, False, all_sms)[0], once(False, True, all_sms)[1])}
    for q in budgets:
        out[f"q={q}"] = once(True, True, q)
    return out


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


def peers(
    prefill: OperationTemplate,
    decode: OperationTemplate,
    layers: list[LayerWeights],
    rows: tuple[int, int],
    sms: tuple[int, int],
) -> tuple[DeepGemm, DeepGemm]:
    """DeepGEMM's kernels for the same operands, for the given rows per expert and SMs."""
    (p_rows, d_rows), (n, k) = rows, layers[0].weights[0].shape[1:]
    capacity = -(-d_rows // 64) * 64
    layout = torch.arange(8, device="cuda", dtype=torch.int32).repeat_interleave(p_rows)
    valid = torch.full((8,), d_rows, device="cuda", dtype=torch.int32)
    sfa = random_scales(8 * (k // 128), capacity)
    b = [w.weights[0].view(-1, k) for w in layers]
    first = peer(Config(n, k, 8, False, 128, 192, 4, 2, sms[0])).bind(
        prefill.rows,
        prefill.row_scales,
        b[0],
        layers[0].scales[0],
        prefill.hidden,
        layout,
        8 * p_rows,
    )
    tile, stages = (128, 5) if d_rows > 64 else (64, 8)
    second = peer(Config(n, k, 8, True, tile, 128, stages, 1, sms[1])).bind(
        decode.rows, sfa, b[1], layers[1].scales[0], decode.hidden, valid, capacity
    )
    return first, second


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    h, i = MODELS["GLM-5.1"]
    shape = KernelShape(h, i, experts=8, top_k=8)
    kernel, layers = PersistentKernel(shape), make_layers(shape, 2)
    pair = Pair(Helpers())
    rows: list[dict] = []
    for reading, p_rows, d_rows in (("per expert", 8192, 128), ("in total", 1024, 16)):
        prefill = OperationTemplate(shape, 1, True, kernel.device, rows=8 * p_rows)
        capacity = -(-d_rows // 64) * 64
        decode = OperationTemplate(shape, 1, False, kernel.device, rows=8 * capacity + 64)
        for op, r, c in ((prefill, p_rows, p_rows), (decode, d_rows, capacity)):
            fill(op)
            op.set_groups([r] * 8, [c * e for e in range(9)])
            op.rows_per_expert = r
        for name, (p, d) in apk(kernel, [prefill, decode], layers, [32, 64, 88, 110, 132]).items():
            rows.append(
                {"reading": reading, "way": "APK", "setting": name, "prefill": p, "decode": d}
            )

        low, high = torch.cuda.Stream(priority=0), torch.cuda.Stream(priority=-5)
        a, b = peers(prefill, decode, layers, (p_rows, d_rows), (132, 132))
        p_work, d_work = (a.launch, low.cuda_stream, None), (b.launch, high.cuda_stream, None)
        alone_p, alone_d = pair.median(p_work, None)[0], pair.median(None, d_work)[1]
        rows.append(
            {
                "reading": reading,
                "way": "DeepGEMM",
                "setting": "exclusive",
                "prefill": alone_p,
                "decode": alone_d,
            }
        )
        p, d = pair.median(p_work, d_work)
        rows.append(
            {"reading": reading, "way": "stream priority", "setting": "", "prefill": p, "decode": d}
        )
        for sms in (32, 64, 96):
            try:
                (ds, dc, dstream), (ps, pc, pstream) = green_streams(sms)
                a, b = peers(prefill, decode, layers, (p_rows, d_rows), (ps - ps % 2, ds))
                p, d = pair.median((a.launch, pstream, pc), (b.launch, dstream, dc))
                rows.append(
                    {
                        "reading": reading,
                        "way": "Green Context",
                        "setting": f"{ds}+{ps} SMs",
                        "prefill": p,
                        "decode": d,
                    }
                )
            except RuntimeError as e:
                print(f"Green Context {sms}: {e}", flush=True)
    out = []
    for r in rows:
        base = next(
            x
            for x in rows
            if x["reading"] == r["reading"]
            and x["setting"] == "exclusive"
            and (x["way"] == "APK") == (r["way"] == "APK")
        )
        for phase in ("decode", "prefill"):
            out.append(
                row(
                    f"{r['reading']}: {r['way']} {r['setting']}: {phase}",
                    "us",
                    r[phase],
                    base[phase],
                    "exclusive, same kernels",
                )
            )
    report("apk_sharing", out, args.json)


if __name__ == "__main__":
    main()
