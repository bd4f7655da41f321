"""The command line of `--executor asyncep`.

Owns: its options, and what of vLLM's is refused. Must not know: processes.
"""

import argparse
import os
from typing import Any

from vllm_expertplex.asyncep.config import AsyncEPConfig, AsyncEPSettings
from vllm_expertplex.config import load_options
from vllm_expertplex.serve import options as shared

# What differs from ExpertPlex: one role, whose scheduler, KV and tasks are vLLM's own.
_OTHER = {
    "--enable-expert-parallel": "experts are always split",
    "--enable-eplb": "every engine computes every expert",
    "--enable-elastic-ep": "restart with another --asyncep-gpus",
    "--distributed-executor-backend": "--executor asyncep is the backend",
    "--scheduler-cls": "engines bring their own scheduler",
    "--kv-transfer-config": "no KV leaves an engine",
    "--kv-events-config": "engines tell the frontend what they cache",
    "--enable-dbo": "leave it out",
    "--ubatch-size": "leave it out",
    "--cpu-offload-gb": "use offload_layers in --asyncep-config",
}
_ALLOWED = ("--runner",)  # pooling models answer from one forward pass
_MORE_GPUS = "use --asyncep-gpus"


def _refusals() -> list[shared.Refusal]:
    found = [shared.Refusal("--tensor-parallel-size", shared.above_one, _MORE_GPUS)]
    for refusal in shared.REFUSALS:
        if refusal.option in _ALLOWED:
            continue
        instead = _OTHER.get(refusal.option, refusal.instead)
        if "--expertplex-layout" in instead:
            instead = _MORE_GPUS
        found.append(shared.allowing_dummy_weights(refusal._replace(instead=instead)))
    return found


def add_options(parser: Any, action: type[argparse.Action]) -> Any:
    """Add the AsyncEP group; `action` makes an option take over the serve command."""
    group = parser.add_argument_group(
        title="AsyncEP",
        description="Prefill-only MoE serving (--executor asyncep): classification, ranking and "
        "scoring read their answer from one forward pass. Every engine computes all experts, and "
        "holds a share of them: the next layer's are gathered while one is computed.",
    )
    group.add_argument(
        "--asyncep-gpus",
        metavar="N",
        type=int,
        default=None,
        action=action,
        help="Number of engines, each on a GPU of its own (default 1).",
    )
    group.add_argument(
        "--asyncep-config",
        metavar="FILE",
        default=None,
        action=action,
        help="JSON or TOML file with further options: "
        + ", ".join(AsyncEPConfig.__struct_fields__)
        + ".",
    )
    return parser


def set_up(args: argparse.Namespace) -> int:
    """Refuse what cannot work, set vLLM's options, and return the threads of an engine."""
    from vllm_expertplex.shapes import core_share

    shared.refuse(args, _refusals())
    for option in ("expertplex_layout", "expertplex_config", "expertplex_plan", "expertplex_trace"):
        if getattr(args, option, None) is not None:
            shared.error(f"--{option.replace('_', '-')} needs --executor expertplex")
    try:
        given = {"gpus": args.asyncep_gpus}
        config = load_options(AsyncEPConfig, "asyncep", args.asyncep_config, given)
    except ValueError as invalid:
        shared.error(str(invalid))
    _apply(args, config)
    return config.threads or core_share(config.gpus)


def _apply(args: argparse.Namespace, config: AsyncEPConfig) -> None:
    from vllm.platforms import current_platform

    from vllm_expertplex.asyncep.executor import EXECUTOR
    from vllm_expertplex.asyncep.loader import LOAD_FORMAT

    settings = AsyncEPSettings(config, AsyncEPSettings.FRONT)
    args.distributed_executor_backend = EXECUTOR
    if args.load_format != shared.DUMMY:
        args.load_format = LOAD_FORMAT
    args.additional_config = {
        **(args.additional_config or {}),
        **settings.to_additional_config(),
    }
    if config.gpus > 1:
        # vLLM leaves out images that it has sent before, but it was to one of several engines.
        args.mm_processor_cache_gb = 0
    if config.kv_free:
        if args.enable_prefix_caching or args.enable_chunked_prefill:
            shared.error(
                "kv_free keeps nothing of a prompt; leave out --enable-prefix-caching and "
                "--enable-chunked-prefill"
            )
        args.enable_prefix_caching = args.enable_chunked_prefill = False
    if not current_platform.is_cpu():
        # The runner whose forward pass can be measured on its own, as engines do when they start.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        # Offloaded experts are loaded to the host, and moved from there to memory all engines see:
        # pinned, it would not be given back.
        os.environ.setdefault("VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY", "1")
        return
    shared.apply_cpu_defaults(args, config.gpus)
    if args.block_size is None:
        # Prefixes are shared in whole blocks. vLLM's default on CPU is 128 tokens; this is the
        # smallest that its attention takes there (on GPUs it is the paper's 16).
        args.block_size = 32
