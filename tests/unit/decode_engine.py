"""A decode server's engine on a device that only keeps time: vLLM's own loop, scheduler and order
of KV reads, around steps that take one unit each.
"""

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from queue import Queue
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorTransferResults,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from vllm_expertplex.executor.scheduler_keys import FIRST_TOKEN

BLOCK = 16
BLOCKS = 17  # one of them is vLLM's null block; few, so that requests are preempted


def engine_config(model: Path, asynchronous: bool) -> VllmConfig:
    config = EngineArgs(
        str(model),
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_batched_tokens=256,
        max_num_seqs=8,
        block_size=BLOCK,
        enforce_eager=True,
        kv_transfer_config=KVTransferConfig(
            kv_connector="NixlConnector", kv_role="kv_consumer", kv_buffer_device="cpu"
        ),
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = BLOCKS
    config.scheduler_config.async_scheduling = asynchronous  # vLLM: not on CPUs
    return config


class Reads(KVConnectorBase_V1):
    """The worker's half of a connector: reads that end at a known time."""

    def __init__(self, device: "Device") -> None:
        self._device = device
        self.takes: dict[str, float] = {}  # by request; set before it arrives
        self.fails: set[str] = set()
        self.names_failed = self.names_blocks = True  # connectors tell failures by either or both
        self._begun: dict[str, tuple[float, Any]] = {}
        self._invalid: set[int] = set()
        self.posted: dict[str, float] = {}
        self.done: set[str] = set()

    def of_process(self) -> AbstractContextManager[Any]:
        """Inside, this is the connector of the process."""
        return patch.object(kv_transfer_state, "_KV_CONNECTOR_AGENT", self)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for name, meta in self._get_connector_metadata().reqs_to_recv.items():
            if meta.awaiting_kvs:  # the others only free what prefill holds
                self.posted[name] = self._device.now
                self._begun[name] = (self._device.now + self.takes[name], meta.local_block_ids)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        ended = {name for name, (end, _) in self._begun.items() if end <= self._device.now}
        failed = ended & self.fails
        for name in ended:
            _, blocks = self._begun.pop(name)
            if name in failed and self.names_blocks:
                self._invalid.update(blocks[0])
        self.done |= ended - failed
        return KVConnectorTransferResults(
            finished_recving=ended, failed_recving=failed if self.names_failed else set()
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def wait_for_layer_load(self, *args: Any) -> None: ...
    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...
    def get_num_new_matched_tokens(self, *args: Any) -> Any: ...
    def update_state_after_alloc(self, *args: Any) -> None: ...
    def build_connector_meta(self, *args: Any) -> Any: ...


class _Later(Future[Any]):
    """What a step returns once it has ended."""

    def __init__(self, device: "Device", end: float, output: Any) -> None:
        super().__init__()
        self._device, self._end = device, end
        self.set_result(output)

    def result(self, timeout: float | None = None) -> Any:
        self._device.now = max(self._device.now, self._end)
        return super().result()


class Device:
    """Runs steps one after another; launching one takes no time."""

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self.now = 0.0
        self.busy_until = 0.0
        self.reads = Reads(self)
        self._launched: tuple[float, ModelRunnerOutput] | None = None
        self.ran: dict[str, float] = {}  # when each request's first step began

    def execute_model(self, scheduled: Any, non_block: bool = False) -> Any:
        tokens = scheduled.num_scheduled_tokens
        runner = KVConnectorModelRunnerMixin
        with (
            self.reads.of_process(),
            set_forward_context(None, self._config),
            runner.maybe_get_kv_connector_output(scheduled) as kv,
        ):
            if tokens:
                begin = max(self.now, self.busy_until)
                self.busy_until = begin + 1
                for name in tokens:
                    self.ran.setdefault(name, begin)
        if not tokens:
            return _Later(self, self.now, ModelRunnerOutput.with_kv_conn_output_only(kv))
        output = ModelRunnerOutput(
            req_ids=list(tokens),
            req_id_to_index={name: i for i, name in enumerate(tokens)},
            sampled_token_ids=[[5] for _ in tokens],
            kv_connector_output=kv,
        )
        self._launched = (self.busy_until, output)
        return _Later(self, self.now, None)

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        assert self._launched is not None
        later = _Later(self, *self._launched)
        return later if non_block else later.result()


class DecodeEngine(EngineCore):
    """vLLM's loop, without the processes around it. `in_process`: the model runs in this one."""

    def __init__(
        self,
        config: VllmConfig,
        scheduler: type[Any],
        in_process: bool = True,
    ) -> None:
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        cache = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
        self.vllm_config = config
        self.log_stats = False
        self.device = Device(config)
        with self.device.reads.of_process() if in_process else nullcontext():
            self.scheduler = scheduler(config, cache, StructuredOutputManager(config), BLOCK)
        self.model_executor = self.device  # type: ignore[assignment]
        asynchronous = bool(config.scheduler_config.async_scheduling)
        self.batch_queue_size = config.max_concurrent_batches
        self.batch_queue = deque[Any]() if asynchronous else None
        self.step_fn = self.step_with_batch_queue if asynchronous else self.step
        self.is_mm_encoder_only = self.is_pooling_model = self.check_for_draft_tokens = False
        self.async_scheduling = asynchronous
        self.aborts_queue = Queue[list[str]]()
        self._weight_version = ""
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self.tokens: dict[str, list[float]] = {}  # when each came
        self.ended: dict[str, str] = {}

    def add(
        self, name: str, prompt: Iterable[int], max_tokens: int, read: float | None = None
    ) -> None:
        """A request arrives; one that was prefilled elsewhere takes `read` steps to fetch."""
        kv = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": ([1],),
            "remote_engine_id": "prefill",
            "remote_request_id": name,
            "remote_host": "localhost",
            "remote_port": 1,
            "tp_size": 1,
            FIRST_TOKEN: 7,
        }
        params = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args=None if read is None else {"kv_transfer_params": kv},
        )
        if read is not None:
            self.device.reads.takes[name] = read
        self.tokens[name] = []
        self.add_request(Request(name, list(prompt), params, None, block_hasher=self._hasher))

    def turn(self) -> None:
        """One round of the loop."""
        outputs, ran = self.step_fn()
        for group in (outputs or {}).values():
            for output in group.outputs:
                name = output.request_id
                self.tokens[name] += [self.device.now] * len(output.new_token_ids)
                if output.finish_reason is not None:
                    assert name not in self.ended
                    self.ended[name] = str(output.finish_reason)
        if not ran:
            self.device.now += 0.125

    @property
    def busy(self) -> bool:
        return self.scheduler.has_requests() or bool(self.batch_queue)

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())
