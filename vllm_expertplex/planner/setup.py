"""Put a planning problem together from what a user names: model, GPU, load, targets, files.

Owns: the one place where descriptions become a `Latency` and a `Problem`; the planner's and the
simulator's commands share it. Must not know: search, output.
"""

import argparse
from typing import NamedTuple

import msgspec

from vllm_expertplex.planner import assumptions as assume
from vllm_expertplex.planner import hardware
from vllm_expertplex.planner.assumptions import Assumptions
from vllm_expertplex.planner.hardware import Gpu, load_gpu
from vllm_expertplex.planner.kernels import Kernels, Roofline
from vllm_expertplex.planner.latency import Latency
from vllm_expertplex.planner.memory import Memory
from vllm_expertplex.planner.model_configs import load_model
from vllm_expertplex.planner.models import ModelSpec
from vllm_expertplex.planner.profile import ProfiledKernels, read_profile
from vllm_expertplex.planner.rates import Problem
from vllm_expertplex.planner.routing import Routing, lognormal_popularity, read_histogram
from vllm_expertplex.planner.search import Space
from vllm_expertplex.planner.sharing import Shares, Sharing
from vllm_expertplex.planner.workload import Targets, Workload, load_workload

MOST_GPUS = 1_000_000


class Setting(NamedTuple):
    """Everything given; `latency(gpus)` builds the model of a deployment of that many GPUs.

    sharing: how servers share GPUs; None where each has its own. ranks: tensor parallelism of every
    attention server; None for the best of each phase.
    """

    model: ModelSpec
    gpu: Gpu
    workload: Workload
    targets: Targets
    assumptions: Assumptions
    routing: Routing
    kernels: Kernels
    sharing: Sharing | None = None
    ranks: int | None = None

    def latency(self, gpus: int) -> Latency:
        nodes = -(-gpus // self.gpu.gpus_per_node)
        shares = self.sharing.shares(self.gpu.sms) if self.sharing else Shares()
        return Latency(
            self.model, self.gpu, self.kernels, self.routing, self.assumptions, nodes, shares
        )

    def memory(self) -> Memory:
        memory = Memory(self.model, self.gpu, self.assumptions)
        if self.sharing:
            layout = self.sharing.layout
            memory.share(layout.prefill, layout.decode, layout.moe, self.sharing.readers)
        return memory

    def problem(self, gpus: int) -> Problem:
        return Problem(self.latency(gpus), self.memory(), self.workload, self.targets)

    def space(self, gpus: int, placement: str = "auto") -> Space:
        """Layouts of `gpus` GPUs. 'alike': every node the same mix; 'free': any split."""
        nodes = -(-gpus // self.gpu.gpus_per_node)
        whole = gpus % self.gpu.gpus_per_node == 0
        if placement == "alike" and not whole:
            raise ValueError(
                f"--placement alike needs whole nodes of {self.gpu.gpus_per_node} GPUs, found "
                f"{gpus} GPUs; use --placement free"
            )
        roles = self.gpu.gpus_per_node >= 3  # a GPU of each fits a node
        if placement == "alike" and not roles:
            raise ValueError(
                f"--placement alike needs nodes of 3 GPUs or more, one for each role, found "
                f"{self.gpu.gpus_per_node}; use --placement free"
            )
        alike = placement == "alike" or (placement == "auto" and whole and roles and nodes <= 8)
        step = self.assumptions.sm_step
        budgets = tuple(range(step, self.gpu.sms, step))
        if not budgets:
            raise ValueError(
                f"--set sm_step={step}: {self.gpu.name} has {self.gpu.sms} SMs, and decode's "
                f"budget is less than all of them; use at most {self.gpu.sms - 1}"
            )
        return Space(gpus, nodes if alike else 1, budgets, self.widths)

    @property
    def widths(self) -> tuple[int, ...]:
        """Tensor parallelisms of an attention server: those that divide its heads."""
        allowed = (1, 2, 4, 8) if self.ranks is None else (self.ranks,)
        return tuple(n for n in allowed if all(a.heads % n == 0 for a in self.model.attention))


def setting(
    model: str | ModelSpec,
    gpu: str | Gpu,
    workload: str | Workload,
    ttft: float,
    tpot: float,
    assumptions: Assumptions | None = None,
    histogram: str | None = None,
    profile: str | None = None,
) -> Setting:
    """Build a `Setting` from names and files. Raises ValueError with what is possible."""
    spec = load_model(model) if isinstance(model, str) else model
    device = load_gpu(gpu) if isinstance(gpu, str) else gpu
    load = load_workload(workload) if isinstance(workload, str) else workload
    values = assumptions or Assumptions()
    measured = read_profile(profile) if profile is not None else None
    if measured:  # its coefficients are for tiles of its heights
        values = msgspec.structs.replace(
            values, contiguous_tile=measured.prefill_tile, masked_tile=measured.decode_tile
        )
    if histogram is not None:
        routing = Routing(
            read_histogram(histogram, spec.experts), spec.top_k, f"measured histogram {histogram}"
        )
    else:
        routing = Routing(
            lognormal_popularity(spec.experts, values.routing_sigma),
            spec.top_k,
            f"assumed log-normal popularity, sigma {values.routing_sigma:g}",
        )
    roofline = Roofline(spec, device, values)
    kernels: Kernels = roofline
    if measured:
        kernels = ProfiledKernels(measured, spec, roofline)
    return Setting(spec, device, load, Targets(ttft, tpot), values, routing, kernels)


def add_setting_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that describe model, GPU, load and targets."""
    parser.add_argument("model", help="catalogue name (minimax-m2.7), directory or config.json")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of the deployment (default 8)")
    parser.add_argument("--gpu", default="h200", help=f"one of {', '.join(hardware.GPUS)}")
    parser.add_argument(
        "--workload",
        default="sharegpt",
        help="a named load, INPUT/OUTPUT mean tokens such as 1000/200, or a trace file",
    )
    parser.add_argument("--ttft", type=float, default=1.0, help="target in seconds (default 1)")
    parser.add_argument("--tpot", type=float, default=0.05, help="target in seconds (default 0.05)")
    parser.add_argument("--routing", metavar="FILE", help="measured expert histogram (JSON)")
    parser.add_argument(
        "--profile", metavar="FILE", help="kernel times measured by `vllm-expertplex profile`"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", dest="assume",
        help="change an assumption; a plan lists them all",
    )  # fmt: skip
    parser.add_argument(
        "--gpu-set", action="append", default=[], metavar="FIELD=NUMBER",
        help="change the GPU description, e.g. memory_bytes=96e9",
    )  # fmt: skip


def setting_from(args: argparse.Namespace) -> Setting:
    """The `Setting` that parsed `add_setting_arguments` options describe."""
    if not 1 <= args.gpus <= MOST_GPUS:
        raise ValueError(f"--gpus {args.gpus}: expected 1 to {MOST_GPUS}")
    return setting(
        args.model,
        hardware.override(load_gpu(args.gpu), args.gpu_set),
        args.workload,
        args.ttft,
        args.tpot,
        assume.override(Assumptions(), args.assume),
        args.routing,
        args.profile,
    )
