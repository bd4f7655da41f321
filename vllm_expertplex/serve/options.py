"""The command line: our options, and what of vLLM's is refused under `--executor expertplex`.

Owns: parsing, defaults, refusals by name before anything starts. Must not know: processes.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from vllm_expertplex.config import (
    ExpertPlexConfig,
    ServerSettings,
    load_config,
    read_options,
)
from vllm_expertplex.serve.planned import follow_plan
from vllm_expertplex.serve.unplanned import choose

DUMMY = "dummy"  # vLLM's load format that reads no checkpoint
EXECUTORS = ("default", "expertplex", "asyncep")

_GiB = 2**30
_KV_SHARE = 0.25  # of free memory, over all attention servers, when nothing is said
_KV_MOST = 2 * _GiB

_refusal: str | None = None


def refuse_start(reason: str | None) -> None:
    """Record why `--executor expertplex` cannot start on this vLLM; None when it can."""
    global _refusal
    _refusal = reason


def add_options(parser: Any) -> Any:
    """Add the ExpertPlex group to vLLM's engine options."""
    group = parser.add_argument_group(
        title="ExpertPlex",
        description="MoE serving with experts held once and shared by separate prefill and decode "
        "servers.",
    )
    group.add_argument(
        "--executor",
        choices=EXECUTORS,
        default="default",
        action=_ServeAction,
        help="Who runs the model: vLLM itself; ExpertPlex; or AsyncEP, for answers of one token.",
    )
    group.add_argument(
        "--expertplex-layout",
        metavar="xPyDzE",
        default=None,
        action=_ServeAction,
        help="Numbers of prefill, decode and MoE servers, for example 1P1D1E (the default on CPUs) "
        "or 1P3D4E. Prefill and decode servers hold attention, MoE servers hold every expert once. "
        "On GPUs the default takes all that are visible.",
    )
    group.add_argument(
        "--expertplex-config",
        metavar="FILE",
        default=None,
        action=_ServeAction,
        help="JSON or TOML file with further options: "
        + ", ".join(ExpertPlexConfig.__struct_fields__)
        + ".",
    )
    group.add_argument(
        "--expertplex-plan",
        metavar="FILE",
        default=None,
        action=_ServeAction,
        help="Run what `vllm-expertplex plan` wrote: its layout, and its limits on batches where "
        "you set none.",
    )
    group.add_argument(
        "--expertplex-trace",
        metavar="FILE",
        default=None,
        action=_ServeAction,
        help="Write a trace of the tile scheduler that opens in Perfetto, one file per MoE server; "
        "on CPUs only.",
    )
    from vllm_expertplex.asyncep.options import add_options as add_asyncep_options

    return add_asyncep_options(parser, _ServeAction)


class _ServeAction(argparse.Action):
    """An option of ours takes over the serve command, which argparse finds in its namespace."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, values)
        if values == self.default:
            return
        # Other commands that run engines share these options, and would ignore them.
        if not parser.prog.endswith(" serve"):
            parser.error(f"{option_string} works with `vllm serve` only")
        from vllm_expertplex.serve.command import serve

        namespace.dispatch_function = serve


class Refusal(NamedTuple):
    """A vLLM option that ExpertPlex does not serve, when `unsupported(value)`."""

    option: str
    unsupported: Callable[[Any], bool]
    instead: str

    @property
    def attribute(self) -> str:
        return self.option.removeprefix("--").replace("-", "_")


def above_one(value: Any) -> bool:
    return value not in (None, 1)


def _given(value: Any) -> bool:
    return value not in (None, False, "", 0, [], {})


def _is_not(*allowed: Any) -> Callable[[Any], bool]:
    return lambda value: value not in (None, *allowed)


_LAYOUT_INSTEAD = "use --expertplex-layout to choose how many servers there are"

REFUSALS = (
    Refusal("--headless", _given, "start the whole deployment with one command"),
    Refusal("--grpc", _given, "use the HTTP server"),
    Refusal("--api-server-count", above_one, "one API server fronts a deployment"),
    Refusal("--pipeline-parallel-size", above_one, _LAYOUT_INSTEAD),
    Refusal("--data-parallel-size", above_one, _LAYOUT_INSTEAD),
    Refusal("--data-parallel-rank", lambda v: v is not None, _LAYOUT_INSTEAD),
    Refusal("--data-parallel-hybrid-lb", _given, _LAYOUT_INSTEAD),
    Refusal("--data-parallel-external-lb", _given, _LAYOUT_INSTEAD),
    Refusal("--data-parallel-multi-port-external-lb", _given, _LAYOUT_INSTEAD),
    Refusal("--prefill-context-parallel-size", above_one, _LAYOUT_INSTEAD),
    Refusal("--decode-context-parallel-size", above_one, _LAYOUT_INSTEAD),
    Refusal("--nnodes", above_one, "all servers run on this machine"),
    Refusal("--enable-expert-parallel", _given, "MoE servers always split experts"),
    Refusal("--enable-eplb", _given, "experts are placed evenly over MoE servers"),
    Refusal("--enable-elastic-ep", _given, "restart with another layout"),
    Refusal("--enable-fault-tolerance", _given, "a lost server costs its own requests only"),
    Refusal("--enable-dbo", _given, "set tbo_tokens in an --expertplex-config file"),
    Refusal("--ubatch-size", _given, "set tbo_tokens in an --expertplex-config file"),
    Refusal("--device-ids", _given, "set CUDA_VISIBLE_DEVICES"),
    Refusal("--distributed-executor-backend", _given, "--executor expertplex is the backend"),
    Refusal("--worker-cls", _is_not("auto"), "leave it out"),
    Refusal("--scheduler-cls", _given, "decode servers bring their own scheduler"),
    Refusal("--kv-transfer-config", _given, "prefill and decode servers set up their own"),
    Refusal("--kv-offloading-size", _given, "leave it out"),
    Refusal("--kv-events-config", _given, "prefill servers tell the router what they cache"),
    Refusal("--speculative-config", _given, "leave it out"),
    Refusal("--enable-lora", _given, "serve a merged checkpoint"),
    Refusal("--enable-sleep-mode", _given, "leave it out"),
    Refusal("--cpu-offload-gb", _given, "use more MoE servers"),
    Refusal("--weight-transfer-config", _given, "experts are loaded at the start only"),
    Refusal("--runner", _is_not("auto", "generate"), "only generation is served"),
    Refusal("--load-format", _is_not("auto", "hf", "safetensors"), "use a safetensors checkpoint"),
)

_ENVIRONMENT = {
    "VLLM_USE_RUST_FRONTEND": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
}


def error(message: str) -> NoReturn:
    """argparse's way to end a command: the message alone, exit code 2."""
    raise SystemExit(_usage_error(message))


def _usage_error(message: str) -> int:
    import sys

    print(f"vllm serve: error: {message}", file=sys.stderr)
    return 2


def check(args: argparse.Namespace) -> ExpertPlexConfig:
    """Refuse what cannot work, by name, and return the configuration. An error ends the command."""
    if args.executor != "expertplex":
        error("the --expertplex-* options need --executor expertplex")
    refuse(args, [allowing_dummy_weights(refusal) for refusal in REFUSALS])
    try:
        config = _config(args, {})
        args.tensor_parallel_size = config.tensor_parallel_size
        if planned := _planned(args):
            config = _config(args, planned)
    except ValueError as invalid:
        error(str(invalid))
    if config.trace is not None:
        _check_trace(config, Path(config.trace))
    return config


def _config(args: argparse.Namespace, planned: dict[str, int]) -> ExpertPlexConfig:
    ranks = args.tensor_parallel_size
    return load_config(
        args.expertplex_config,
        planned,
        layout=args.expertplex_layout,
        tensor_parallel_size=ranks if above_one(ranks) else None,
        trace=args.expertplex_trace,
    )


def _planned(args: argparse.Namespace) -> dict[str, int]:
    """Options of a plan that was given, or of what is chosen for those who give no layout."""
    file = read_options("expertplex", args.expertplex_config)
    if args.expertplex_plan is not None:
        if "layout" in file:
            raise ValueError(
                f"give --expertplex-plan or a layout in {args.expertplex_config}, not both"
            )
        planned = follow_plan(args)
    elif args.expertplex_layout is not None or "layout" in file:
        return {}
    else:
        planned = choose(args)
    share = planned.get("moe_sm_percent")
    if file.get("moe_sm_percent", share) != share and share is not None:
        del planned["decode_sms"]  # of another number of SMs, which may be fewer
    return planned


def _check_trace(config: ExpertPlexConfig, file: Path) -> None:
    """A trace is written when serving ends, which is late to learn that there is none."""
    if not file.absolute().parent.is_dir():
        error(f"--expertplex-trace {file}: {file.absolute().parent} is no directory")
    if config.moe_backend == "torch":
        error("--expertplex-trace needs the tile scheduler, which moe_backend torch is without")


def allowing_dummy_weights(refusal: Refusal) -> Refusal:
    """For measuring without a checkpoint: every server draws its own random weights."""
    if refusal.option != "--load-format":
        return refusal
    return refusal._replace(unsupported=_is_not("auto", "hf", "safetensors", DUMMY))


def refuse(args: argparse.Namespace, refusals: Sequence[Refusal]) -> None:
    """End the command, by name, for what cannot work with the executor that was chosen."""
    if _refusal is not None:
        error(_refusal)
    for refusal in refusals:
        value = getattr(args, refusal.attribute, None)
        if refusal.unsupported(value):
            error(
                f"{refusal.option} {value} is not supported with --executor "
                f"{args.executor}; {refusal.instead}"
            )
    for name, value in _ENVIRONMENT.items():
        if os.environ.get(name) == value:
            error(f"{name}={value} is not supported with --executor {args.executor}; unset it")
    _check_checkpoint(getattr(args, "model_tag", None) or args.model)


def _check_checkpoint(model: str) -> None:
    """Say of a path that it is no checkpoint before vLLM takes it for a name on a model hub."""
    if not model.startswith(("/", "./", "../", "~")):
        return
    folder = Path(model).expanduser()
    if not (folder / "config.json").is_file():
        found = "has no config.json" if folder.is_dir() else "is no directory"
        error(f"model {model}: {found}; give the directory of a checkpoint or its name on a hub")


def apply(args: argparse.Namespace, config: ExpertPlexConfig) -> None:
    """Set vLLM's options for a deployment of `config`; what the user set stays."""
    from vllm.platforms import current_platform

    from vllm_expertplex.executor.executor import EXECUTOR, TP_EXECUTOR
    from vllm_expertplex.executor.loader import LOAD_FORMAT
    from vllm_expertplex.serve.deployment import kv_transfer_config
    from vllm_expertplex.shapes import sources

    settings = ServerSettings(config, ServerSettings.FRONT)
    args.tensor_parallel_size = config.tensor_parallel_size
    args.distributed_executor_backend = EXECUTOR if args.tensor_parallel_size == 1 else TP_EXECUTOR
    if args.load_format != DUMMY:
        args.load_format = LOAD_FORMAT
    # vLLM would leave out an image that it has sent before, but the engine that gets it now may not
    # be one of those that had it: the request would fail.
    args.mm_processor_cache_gb = 0
    # The API server accounts for decode's KV transfers; its statistics need the configuration.
    args.kv_transfer_config = kv_transfer_config(settings, "decode")
    args.additional_config = {
        **(args.additional_config or {}),
        **settings.to_additional_config(),
    }
    if current_platform.is_cpu():
        apply_cpu_defaults(args, len(sources(config)))
    else:
        if config.trace is not None:
            error("--expertplex-trace is written by MoE servers on CPUs only; leave it out")
        # Only this runner lets a decode server start with the token that prefill has sampled.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"


def apply_cpu_defaults(args: argparse.Namespace, workers: int) -> None:
    """What suits `workers` workers of engines on one CPU, where the user said nothing."""
    # vLLM's default on CPU, torch.compile, takes minutes to start and rounds differently from eager
    # execution. Whoever wants it says --compilation-config.
    if not _compilation_chosen(args):
        args.enforce_eager = True
    if args.enforce_eager:
        # Even then vLLM compiles one function, when an answer first needs logprobs: seconds of
        # every engine, for a comparison and a sum (v1/sample/ops/logprobs.py).
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    if args.kv_cache_memory_bytes is None and not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        import psutil

        share = int(psutil.virtual_memory().available * _KV_SHARE / workers)
        args.kv_cache_memory_bytes = min(share, _KV_MOST)


def _compilation_chosen(args: argparse.Namespace) -> bool:
    from vllm.config import CompilationConfig

    chosen = getattr(args, "compilation_config", None)
    return chosen is not None and chosen != CompilationConfig()
