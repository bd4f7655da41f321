"""The latency model against runs on H200s, with nothing fitted to the runs it is judged by.

    python benchmarks/simulator_gpu_runs.py --json results.json

Measured on one host with H200s on 2026-11-29: DeepGEMM FP8 kernels, the one-sided exchange between
two processes, and vLLM 0.32.0 serving MiniMax-M2.7's dimensions with fewer layers on two GPUs
(tensor-parallel attention, expert-parallel experts). The H200's GEMM and HBM efficiencies and the
exchange floor come from the first two, so only the engine runs are predictions. Those ran on
vLLM's dummy weights, with which a router that has a bias sends every token to the same experts;
whether theirs had one was not recorded.

`layer` rows are what `vllm-expertplex profile` measured on 2026-11-30, with all experts on one GPU
and even routing. `served` rows are vLLM and ExpertPlex on two GPUs the same day
(`results/model_speed-h200-x2.json`: 16 layers, dummy weights without a routing bias, each system
alone), against the latency model and against the profile. Attention limited to a part of a GPU's
SMs (MPS) stretches as the simulator's SM partition does: prefill as 1 / share, decode as far as
bandwidth.
"""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from _report import Row, write
from rich.console import Console
from rich.table import Table

from vllm_expertplex.planner.assumptions import Assumptions
from vllm_expertplex.planner.hardware import GPUS
from vllm_expertplex.planner.kernels import DECODE, PREFILL, Roofline
from vllm_expertplex.planner.latency import Latency, Parts
from vllm_expertplex.planner.model_configs import load_model
from vllm_expertplex.planner.models import ModelSpec
from vllm_expertplex.planner.profile import ProfiledKernels, read_profile
from vllm_expertplex.planner.routing import MoeLoad, Routing, lognormal_popularity

RESULTS = Path(__file__).parent / "results"
PROFILE = RESULTS / "profile-minimax-m2.7-h200.json"
SERVED = RESULTS / "model_speed-h200-x2.json"
SERVED_LAYERS, SERVED_CONTEXT, SERVED_STEP = 16, 576, 8192  # 512 and 64 tokens: mean of a decode
PLAIN = Assumptions(  # DeepGEMM, not APK; random weights route evenly; kernels alone have no host
    apk_prefill_overhead=0.0, apk_decode_overhead=0.0, routing_sigma=0.0
)


def kernels(rows: list[Row]) -> None:
    """Both grouped GEMMs of one layer, microseconds."""
    cases = (
        ("minimax-m2.7", PREFILL, 64, 8192, 195 + 108),
        ("minimax-m2.7", PREFILL, 64, 32768, 487 + 264),
        ("glm-5.1-fp8", PREFILL, 16, 8192, 324 + 170),
        ("minimax-m2.7", DECODE, 16, 64, 53 + 36),
        ("minimax-m2.7", DECODE, 64, 256, 167 + 90),
        ("glm-5.1-fp8", DECODE, 16, 64, 110 + 61),
    )
    for name, phase, experts, routed, measured in cases:
        model = load_model(name)
        tile = PLAIN.contiguous_tile if phase == PREFILL else PLAIN.masked_tile
        tiles = experts * np.ceil(routed / experts / tile)
        load = MoeLoad(np.array([tiles]), np.array([float(experts)]), np.array([0.0]))
        whole = Roofline(model, GPUS["h200"], PLAIN).routed_experts(phase, load, 1.0)
        ours = float(np.squeeze(whole)) / model.moe_layers
        what = f"kernel: {name} {phase}, {experts} experts, {routed} rows"
        rows.append(Row(what, "us", ours * 1e6, measured, "measured", None))


def exchange(rows: list[Row]) -> None:
    """Dispatch and combine of one layer to one MoE server, hidden 3072, microseconds."""
    latency = build(load_model("minimax-m2.7"))
    for tokens, measured in ((64, 12.8 - 4.8), (256, 18.5 - 5.1), (8192, 79 + 140)):
        count = float(tokens)
        ours = latency.network.exchange(count, count, np.array([1.0]), np.array([1]), False)
        what = f"exchange: {tokens} tokens, one server"
        rows.append(Row(what, "us", float(ours[0]) * 1e6, measured, "measured", None))


def layer(rows: list[Row]) -> None:
    """Attention and MoE operation of one layer, microseconds, against the measured profile."""
    model = load_model("minimax-m2.7")
    modelled = Roofline(model, GPUS["h200"], Assumptions(routing_sigma=0.0))
    measured = ProfiledKernels(read_profile(str(PROFILE)), model, modelled)
    routing = build(model).routing
    for phase, tile in ((DECODE, 64), (PREFILL, 128)):
        for tokens in (16, 64, 256) if phase == DECODE else (512, 2048, 8192):
            load = routing.load(np.array([1]), np.array([tokens]), tile)
            times = (float(k.routed_experts(phase, load, 1.0)[0]) for k in (modelled, measured))
            add_layer(rows, f"experts, {phase} of {tokens} tokens", model, *times)
    for batch, length in ((16, 512), (64, 2048), (256, 2048)):
        times = (float(k.decode_attention(batch, length, 1)) for k in (modelled, measured))
        add_layer(rows, f"attention, decode of {batch} at {length}", model, *times)
    for count, length in ((1, 512), (4, 2048), (1, 8192)):
        times = (float(k.prefill_attention(count, length, 1)) for k in (modelled, measured))
        add_layer(rows, f"attention, prefill of {count} x {length}", model, *times)


def add_layer(rows: list[Row], what: str, model: ModelSpec, ours: float, peer: float) -> None:
    scale = 1e6 / model.layers
    rows.append(Row(f"layer: {what}", "us", ours * scale, peer * scale, "measured", None))


def engine(rows: list[Row]) -> None:
    """vLLM iterations on two GPUs, milliseconds: a TP 2 attention group, experts on both."""
    both = np.array([2])

    def group(layers: int) -> Latency:
        latency = build(shortened(layers))
        latency.as_one_group(2)
        return latency

    def prefill(layers: int, count: int, length: int) -> float:
        step = group(layers).prefill_step
        return float(np.squeeze(step(count, length, count * length, both, 1.0, 2).total))

    def decode(layers: int, batch: int, length: int) -> float:
        step = group(layers).decode_step
        return float(np.squeeze(step(batch, length, batch, both, 1.0, 2).total))

    cases = (
        ("31 layers, prefill 16 x 1024", prefill(31, 16, 1024), 198.0),
        ("31 layers, prefill 2 x 8192", prefill(31, 2, 8192), 195.0),
        ("31 layers, decode batch 8", decode(31, 8, 1024), 4.9),
        ("8 layers (Triton MoE), prefill 8 x 1024", prefill(8, 8, 1024), 74.0),
        ("8 layers (Triton MoE), 64 x (1024 in, 64 out)",
         prefill(8, 64, 1024) + 63 * decode(8, 64, 1056), 1990.0),
    )  # fmt: skip
    for name, seconds, measured in cases:
        rows.append(Row(f"engine: {name}", "ms", seconds * 1e3, measured, "measured", None))


class Deployed(NamedTuple):
    """A system of the `served` rows. SM shares: of the MoE servers, of attention by phase."""

    servers: int
    tp: int
    apk: bool  # else DeepGEMM
    moe: float = 1.0
    prefill: float = 1.0
    decode: float = 1.0


VLLM = "vLLM TP2+EP2"
DEPLOYED = {
    VLLM: Deployed(2, 2, False),
    "1P1D1E": Deployed(1, 1, True, prefill=0.6),
    "1P1D2E": Deployed(2, 1, True, moe=78 / 132, prefill=54 / 132, decode=54 / 132),
}


def served(rows: list[Row]) -> None:
    """Decode steps, prefill steps and lone prompts of whole systems, milliseconds."""
    measured: dict[str, dict[str, float]] = {name: {} for name in DEPLOYED}
    for row in json.loads(SERVED.read_text())["rows"]:
        system, _, what = row["name"].partition(": ")
        if system in measured:
            measured[system][what] = row["ours"]
            measured[VLLM][what] = row["peer"]
    for name, system in DEPLOYED.items():
        found = measured[name]
        for source in ("model", "profile"):
            steps = Served(system, source == "profile")
            cases = {
                f"decode of {n}": (steps.decode(n), found[f"decode {n} requests"])
                for n in (1, 16, 64)
            }
            step = SERVED_STEP / found["prefill"] * 1e3
            cases[f"prefill step of {SERVED_STEP}"] = (steps.prefill(SERVED_STEP), step)
            for n in (512, 2048):
                cases[f"TTFT of one prompt of {n}"] = (
                    steps.prefill(n),
                    found[f"TTFT of one prompt of {n}"],
                )
            for what, (ours, peer) in cases.items():
                label = f"served: {name}, {what} ({source})"
                rows.append(Row(label, "ms", ours, peer, "measured", None))


class Served:
    """Iterations of one deployed system, milliseconds, from rates or from the profile."""

    def __init__(self, system: Deployed, profile: bool) -> None:
        self.system, self.servers = system, np.array([system.servers])
        model = shortened(SERVED_LAYERS)
        self.assumptions = Assumptions(routing_sigma=0.0) if system.apk else PLAIN
        self.latency = build(model, self.assumptions)
        if system.tp > 1:
            self.latency.as_one_group(system.tp)
        if profile:
            rates = Roofline(model, GPUS["h200"], self.assumptions)
            self.latency.kernels = ProfiledKernels(read_profile(str(PROFILE)), model, rates)

    def prefill(self, tokens: int) -> float:
        s = self.system
        parts = self.latency.prefill_step(1, tokens, tokens, self.servers, s.moe, s.tp)
        return milliseconds(parts, s.prefill)

    def decode(self, batch: int) -> float:
        s = self.system
        parts = self.latency.decode_step(batch, SERVED_CONTEXT, batch, self.servers, s.moe, s.tp)
        return milliseconds(parts, min(1.0, s.decode / self.assumptions.hbm_saturation))


def milliseconds(parts: Parts, share: float) -> float:
    """A step whose attention is stretched to a share of its GPU."""
    return float(np.squeeze(parts.total + parts.attention * (1 / share - 1))) * 1e3


def shortened(layers: int) -> ModelSpec:
    model = load_model("minimax-m2.7")
    attention = (msgspec.structs.replace(model.attention[0], layers=layers),)
    return msgspec.structs.replace(model, attention=attention, moe_layers=layers)


def build(model: ModelSpec, assume: Assumptions = PLAIN) -> Latency:
    routing = Routing(
        lognormal_popularity(model.experts, assume.routing_sigma), model.top_k, "even"
    )
    kernels_ = Roofline(model, GPUS["h200"], assume)
    return Latency(model, GPUS["h200"], kernels_, routing, assume, nodes=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    rows: list[Row] = []
    kernels(rows)
    exchange(rows)
    layer(rows)
    engine(rows)
    served(rows)
    table = Table(title="Latency model (modelled) against H200 measurements")
    for name in ("what", "unit", "modelled", "measured", "ratio", "measurement was used"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for row in rows:
        used = (
            "no"
            if row.name.startswith(("engine", "layer", "served"))
            else "for efficiencies or floors"
        )
        table.add_row(
            row.name, row.unit, f"{row.ours:.1f}", f"{row.peer:.1f}", f"{row.ratio:.2f}", used
        )
    Console().print(table)
    write("simulator_gpu_runs", rows, args.json)


if __name__ == "__main__":
    main()
