"""The configuration of a deployment and the environment variables it travels in.

Owns: every option with its default and meaning, validation, the table of environment variables.
Must not know: processes, tensors, vLLM.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec

from vllm_expertplex.layout import Layout

# Seconds; they become 64-bit nanoseconds.
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]

# Key of our settings in vLLM's `additional_config`, which reaches every process. It is hashed into
# vLLM's compile cache key, so nothing that differs between two starts may be in it.
ADDITIONAL_CONFIG_KEY = "expertplex"

_NOTHING: Mapping[str, Any] = MappingProxyType({})

# Environment variables, all set by the serve command for its own processes.
ENV_RUN_DIR = "VLLM_EXPERTPLEX_RUN_DIR"  # owner-only directory of this run: slots, sockets, records


class ExpertPlexConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of one deployment; a `--expertplex-config` file holds any of them as JSON or TOML."""

    layout: str = "1P1D1E"
    """`xPyDzE`: how many prefill, decode and MoE servers."""
    tensor_parallel_size: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Ranks that share each attention server's layers, a process and a GPU each; the same as
    --tensor-parallel-size. Experts are not divided."""
    moe_backend: Literal["auto", "cuda", "tiles", "torch"] = "auto"
    """What computes experts: the persistent kernel on GPUs (`cuda`); on CPUs the tile scheduler
    (`tiles`), or one operation at a time (`torch`)."""
    moe_threads: NonNegative = 0
    """Worker threads of a MoE server on CPU; 0 takes a fair share of the cores."""
    attention_threads: NonNegative = 0
    """OpenMP threads of an attention server on CPU; 0 takes a fair share of the cores."""
    prefill_sm_percent: Annotated[int, msgspec.Meta(ge=1, le=100)] = 60
    """Share of a GPU's SMs, of those that no MoE server holds, that a prefill server may use where
    other attention servers are on that GPU."""
    moe_sm_percent: Annotated[int, msgspec.Meta(ge=1, le=99)] = 50
    """Share of a GPU's SMs that MoE servers hold where attention servers are on that GPU, too."""
    tbo_tokens: NonNegative = 0
    """Prefill steps of at least so many tokens run as two microbatches, one's attention while the
    MoE servers have the other (two-batch overlap); 0: none."""
    decode_sms: NonNegative = 0
    """SMs of a MoE server's GPU that decode has at `expected_x_moe` while prefill has work, too,
    and more or fewer in proportion (eq. 4, ExpertPlex section 6); 0: it may have them all."""
    expected_x_moe: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Pairs of an expert and a block of its rows that a decode operation has on average."""
    moe_scheduling: Literal["preemptive", "fifo"] = "preemptive"
    """Decode takes over from prefill at tile boundaries (`preemptive`); or operations are served
    one after the other in order of arrival, whatever their phase (`fifo`), to measure what the
    former gains."""
    coalescing: bool = True
    """Decode operations of one layer from several servers run as one, which reads experts once;
    never with `moe_scheduling` `fifo`."""
    moe_timeout_s: Positive = 60.0
    """Deadline of one remote MoE layer; passing it fails the attention server that waited."""
    spin_us: Annotated[int, msgspec.Meta(ge=-1)] = -1
    """Busy wait before sleeping on a signal; -1 decides by the number of cores, 0 never spins."""
    heartbeat_timeout_s: Positive = 20.0
    """A MoE server whose heartbeat is older than this counts as dead."""
    startup_timeout_s: Positive = 1800.0
    """Deadline for all servers to load their weights."""
    kv_lease_s: Annotated[float, msgspec.Meta(ge=1, le=1e9)] = 30.0
    """How long a prefill server keeps KV blocks for a decode server that never asks for them."""
    trace: str | None = None
    """File for a Perfetto trace of the tile scheduler, one per MoE server; on CPUs only."""

    def __post_init__(self) -> None:
        Layout.parse(self.layout)  # raises with the expected form

    @property
    def fifo(self) -> bool:
        return self.moe_scheduling == "fifo"

    @property
    def parsed_layout(self) -> Layout:
        return Layout.parse(self.layout)


class ServerSettings(msgspec.Struct, frozen=True):
    """What `additional_config["expertplex"]` holds: the deployment, and who this process is."""

    config: ExpertPlexConfig
    role: str
    rank: int = 0

    FRONT: ClassVar[str] = "front"  # the API server, which is no server of the layout

    def to_additional_config(self) -> dict[str, Any]:
        return {ADDITIONAL_CONFIG_KEY: msgspec.to_builtins(self)}

    @classmethod
    def from_additional_config(cls, additional_config: Any) -> "ServerSettings | None":
        """The settings in vLLM's `additional_config`, or None where ExpertPlex is not in use."""
        return settings_in(additional_config, ADDITIONAL_CONFIG_KEY, cls)


Options = TypeVar("Options", bound=msgspec.Struct)


def settings_in(additional_config: Any, key: str, kind: type[Options]) -> Options | None:
    """The settings under `key` of vLLM's `additional_config`, or None where there are none."""
    if not isinstance(additional_config, dict):
        return None
    raw = additional_config.get(key)
    return None if raw is None else msgspec.convert(raw, kind)


def load_config(
    path: str | None, planned: Mapping[str, Any] = _NOTHING, **overrides: Any
) -> ExpertPlexConfig:
    """Read a JSON or TOML file (None: defaults) and apply the options that are not None.

    `planned`: in place of defaults. Raises ValueError that names the file, the option and what was
    expected.
    """
    return load_options(ExpertPlexConfig, "expertplex", path, overrides, planned)


def read_options(executor: str, path: str | None) -> dict[str, Any]:
    """What a file of options says (None: nothing). Raises ValueError that names the file."""
    if path is None:
        return {}
    where, file = f"--{executor}-config {path}", Path(path)
    decode = msgspec.toml.decode if file.suffix == ".toml" else msgspec.json.decode
    try:
        return decode(file.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ValueError(f"{where}: {error.strerror}; give a readable JSON or TOML file") from None
    except msgspec.DecodeError as error:
        raise ValueError(f"{where}: {error}; expected a JSON or TOML table of options") from None


def load_options(
    kind: type[Options],
    executor: str,
    path: str | None,
    overrides: Mapping[str, Any],
    planned: Mapping[str, Any] = _NOTHING,
) -> Options:
    """`load_config` for the options of any executor, whose names begin with --`executor`."""
    where = f"--{executor}-config {path}" if path else f"--{executor}-* options"
    given = {name: value for name, value in overrides.items() if value is not None}
    values = {**planned, **read_options(executor, path), **given}
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        options = ", ".join(kind.__struct_fields__)
        raise ValueError(f"{where}: {error}; the options are: {options}") from None


def run_dir() -> Path:
    """The owner-only directory of this run. Raises RuntimeError outside `vllm serve`."""
    path = os.environ.get(ENV_RUN_DIR)
    if path is None:
        raise RuntimeError(
            f"{ENV_RUN_DIR} is not set: ExpertPlex servers are started by "
            "`vllm serve MODEL --executor expertplex`, not on their own"
        )
    return Path(path)
