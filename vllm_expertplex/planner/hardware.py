"""GPUs and their links, every value marked as data sheet, derived or measured.

Owns: `Gpu` and the table of known ones. Must not know: models, layouts.
Rates are peaks; `Efficiency` says what part of a peak kernels reach, and where that figure is from.
"""

from typing import Annotated, Any

import msgspec

from vllm_expertplex.planner.numbers import Count, Rate, Share, checked, parse

GB = 1e9


class Efficiency(msgspec.Struct, frozen=True, kw_only=True):
    """What part of a peak is reached. `source` says why one should believe it."""

    gemm: Share = 0.60
    attention: Share = 0.50
    hbm: Share = 0.72
    link: Share = 0.80
    source: str = "assumed from the H200 measurements"


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU and the links of its node. Link rates are per GPU and per direction."""

    name: str
    memory_bytes: Rate
    hbm_bytes_per_s: Rate
    fp8_flops: Rate
    bf16_flops: Rate
    sms: Annotated[int, msgspec.Meta(ge=2, le=10_000)]
    nvlink_bytes_per_s: Rate
    rdma_bytes_per_s: Rate = 50 * GB
    gpus_per_node: Count = 8
    efficiency: Efficiency = Efficiency()
    source: str = "data sheet"

    def flops(self, bytes_per_parameter: float) -> float:
        """Dense peak for weights of that width; 4-bit weights compute in FP8 or wider."""
        return self.fp8_flops if bytes_per_parameter < 1.5 else self.bf16_flops

    @property
    def nvlink(self) -> float:
        """Achievable bytes/s of NVLink."""
        return self.nvlink_bytes_per_s * self.efficiency.link

    @property
    def rdma(self) -> float:
        """Achievable bytes/s of the GPU's NIC."""
        return self.rdma_bytes_per_s * self.efficiency.link


_HOPPER: dict[str, Any] = {"fp8_flops": 1979e12, "bf16_flops": 989e12, "sms": 132}

GPUS: dict[str, Gpu] = {
    "h800": Gpu(
        name="h800",
        memory_bytes=80 * GB,
        hbm_bytes_per_s=3350 * GB,
        nvlink_bytes_per_s=200 * GB,
        efficiency=Efficiency(
            gemm=0.43,
            hbm=0.80,
            source=(
                "derived from the ExpertPlex paper's kernel times on MiniMax-M2.7 EP4: 853 TFLOP/s "
                "at 16K tokens; 52.4 us for 8 active experts, 10 us of it fixed; links from "
                "DeepSeek-V3's 160 GB/s"
            ),
        ),
        **_HOPPER,
    ),
    "h100": Gpu(
        name="h100",
        memory_bytes=80 * GB,
        hbm_bytes_per_s=3350 * GB,
        nvlink_bytes_per_s=450 * GB,
        **_HOPPER,
    ),
    "h200": Gpu(
        name="h200",
        memory_bytes=141 * GB,
        hbm_bytes_per_s=4800 * GB,
        nvlink_bytes_per_s=450 * GB,
        efficiency=Efficiency(
            gemm=0.62,
            hbm=0.74,
            link=0.82,
            source=(
                "measured on H200: DeepGEMM FP8 1171-1274 TFLOP/s contiguous, 3.3-3.65 TB/s "
                "masked; NVLink 370 GB/s by peer stores and loads"
            ),
        ),
        source="data sheet; efficiencies measured",
        **_HOPPER,
    ),
    "b200": Gpu(
        name="b200",
        memory_bytes=180 * GB,
        hbm_bytes_per_s=8000 * GB,
        fp8_flops=4500e12,
        bf16_flops=2250e12,
        sms=148,
        nvlink_bytes_per_s=900 * GB,
    ),
}


def load_gpu(name: str) -> Gpu:
    """A known GPU by name, in any case. Raises ValueError with the known names."""
    try:
        return GPUS[name.lower()]
    except KeyError:
        raise ValueError(
            f"GPU {name!r} is unknown; known are {', '.join(GPUS)}. For another one, measure it "
            "with `vllm-expertplex profile` and pass the result with --profile, or start from the "
            "nearest known one and change it with --gpu-set, e.g. --gpu h100 --gpu-set "
            "memory_bytes=96e9"
        ) from None


def override(gpu: Gpu, changes: list[str]) -> Gpu:
    """Apply `field=value` changes (`efficiency.gemm=0.5` included); the source says so.

    Raises ValueError naming the fields there are, or what one may be.
    """
    source = gpu.source
    for change in changes:
        values = msgspec.to_builtins(gpu)
        path = change.partition("=")[0]
        target, key = values, path
        if path.startswith("efficiency."):
            target, key = values["efficiency"], path.removeprefix("efficiency.")
        if key not in target or isinstance(target[key], str | dict):
            raise ValueError(
                f"--gpu-set {change!r}: no such number; there are "
                f"{', '.join(k for k, v in values.items() if not isinstance(v, str | dict))}, "
                "efficiency.gemm, efficiency.attention, efficiency.hbm, efficiency.link"
            )
        target[key] = parse("--gpu-set", change, type(target[key]))
        gpu = checked("--gpu-set", change, values, Gpu)
    if changes:
        source += f"; changed by hand: {', '.join(changes)}"
    return msgspec.structs.replace(gpu, source=source)
