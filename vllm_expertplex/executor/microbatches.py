"""Two-batch overlap: a prefill step runs as two microbatches, one's attention while the MoE servers
have the other (ExpertPlex section 5).

Owns: which steps are cut in two, and the threads that run the halves.
Must not know: transports, MoE servers, where halves give way.

vLLM cuts steps (attention metadata, slot mappings) for its dual-batch overlap, but only for data
parallelism, with an all-to-all of its own (v1/worker/gpu_ubatch_wrapper.py). Here the halves need
no second stream: what they wait for happens on other GPUs, so both queue their kernels on one
stream, and the wait for one half's experts comes behind the other half's attention. On CPUs one
half's thread waits for its experts when the other has nothing left to do but wait, too.
"""

from __future__ import annotations

import copy
import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch
from vllm import forward_context
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.worker import ubatching

from vllm_expertplex.executor.patches import PatchError, remedy
from vllm_expertplex.executor.turns import PartnerFailed, Turns, taking

HALVES = 2
# Between two turns a half computes one layer, or queues its kernels, of which some are compiled
# first; on CPUs it has waited for its experts as well, which has a deadline of its own.
_TURN_S = 120.0


def prepared(vllm_config: VllmConfig) -> VllmConfig:
    """A configuration for which vLLM's worker builds what two halves need: workspaces, metadata
    builders. A copy, because vLLM checks its own again once the engine runs, and refuses
    microbatches without its all-to-all.

    Raises ValueError for models that cannot be cut.
    """
    if vllm_config.model_config.is_multimodal_model:
        raise ValueError(
            f"tbo_tokens: {vllm_config.model_config.model} takes more than text, and its steps "
            "cannot be cut in two; set tbo_tokens = 0"
        )
    mine = copy.copy(vllm_config)
    mine.parallel_config = copy.copy(vllm_config.parallel_config)
    mine.parallel_config.enable_dbo = True
    # SMs that vLLM would set aside for its all-to-all, and insists that the GPU has: a prefill
    # server's share of one may be smaller.
    os.environ.setdefault("VLLM_DBO_COMM_SMS", "0")
    return mine


def install(runner: Any, vllm_config: VllmConfig, tokens: int, moe_timeout_s: float) -> None:
    """Cut steps of at least `tokens` tokens of `runner`, a GPUModelRunner that has its model.

    `moe_timeout_s`: the deadline of a remote layer.
    """
    runner._model_forward = Halves(runner, vllm_config, _TURN_S + moe_timeout_s)
    runner.initialize_metadata_builders = building_each(runner, runner.initialize_metadata_builders)
    runner._determine_batch_execution_and_padding = cutting(
        runner._determine_batch_execution_and_padding, tokens
    )


def building_each(runner: Any, create: Callable[..., None]) -> Callable[..., None]:
    """GPUModelRunner.initialize_metadata_builders; its builders then make metadata for every half.

    For builders that can put another block table into metadata of before, vLLM keeps that by KV
    cache group (`_build_attention_metadata`), and does not ask whose half it is: the second half's
    attention would run with the first one's lengths. Raises PatchError where they are not asked.
    """

    def create_builders(*args: Any, **kwargs: Any) -> None:
        create(*args, **kwargs)
        for group in itertools.chain.from_iterable(runner.attn_groups):
            for builder in group.metadata_builders:
                if not hasattr(builder, "supports_update_block_table"):
                    raise PatchError(
                        f"patch 'microbatches': vLLM's {type(builder).__name__} has no "
                        f"supports_update_block_table; {remedy()}, or set tbo_tokens = 0"
                    )
                builder.supports_update_block_table = False

    return create_builders


def cutting(decide: Callable[..., tuple], tokens: int) -> Callable[..., tuple]:
    """GPUModelRunner._determine_batch_execution_and_padding, which then says which steps are cut.

    vLLM calls it by keyword. Only requests' steps are cut: those that warm up or measure memory
    tell `force_uniform_decode`, and are to be as large as a step that is not cut.
    """

    def decide_and_cut(**step: Any) -> tuple:
        mode, batch, cut, across, stats = decide(**step)
        cut = cut or (
            mode is CUDAGraphMode.NONE
            and step.get("force_uniform_decode") is None
            and step["allow_microbatching"]
            and step["num_tokens"] >= max(tokens, HALVES)
        )
        return mode, batch, cut, across, stats

    return decide_and_cut


class Halves:
    """GPUModelRunner._model_forward, which runs the steps that vLLM has cut as two halves that take
    turns. The first half runs in the caller's thread.
    """

    def __init__(self, runner: Any, vllm_config: VllmConfig, turn_s: float) -> None:
        self._whole, self._runner, self._vllm_config = runner._model_forward, runner, vllm_config
        self._turn_s = turn_s
        self._second = ThreadPoolExecutor(1, thread_name_prefix="microbatch")

    def __call__(self, **inputs: Any) -> torch.Tensor:
        whole = forward_context.get_forward_context()
        if whole.ubatch_slices is None:
            return self._whole(**inputs)
        contexts = [self._context(whole, i) for i in range(HALVES)]
        parts = [sliced(inputs, part.token_slice) for part in whole.ubatch_slices]
        model, same_stream = self._runner.get_model(), self._same_stream()
        try:
            return run_in_turns(model, parts, contexts, self._second, same_stream, self._turn_s)
        finally:
            forward_context._forward_context = whole

    def _same_stream(self) -> Callable[[], None]:
        """Makes another thread queue its kernels where this one does."""
        if self._runner.device.type == "cpu":
            return lambda: None
        stream = torch.cuda.current_stream()

        def use() -> None:
            torch.cuda.set_device(stream.device)
            torch.cuda.set_stream(stream)

        return use

    def _context(self, whole: forward_context.ForwardContext, i: int) -> Any:
        assert whole.ubatch_slices is not None
        attention, slots, padding = whole.attn_metadata, whole.slot_mapping, whole.is_padding
        return forward_context.create_forward_context(
            attention[i] if attention is not None else None,
            self._vllm_config,
            batch_descriptor=whole.batch_descriptor,
            slot_mapping=slots[i] if isinstance(slots, list) else None,
            is_padding=None if padding is None else padding[whole.ubatch_slices[i].token_slice],
        )


def sliced(inputs: dict[str, Any], tokens: slice) -> dict[str, Any]:
    """The inputs of one half: of every tensor the tokens' part. Tokens come first but in
    `positions`, which are [dimensions, tokens] under M-RoPE.
    """

    def part(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value[..., tokens] if name == "positions" else value[tokens]

    return {name: part(name, value) for name, value in inputs.items()}


def run_in_turns(
    model: Callable[..., torch.Tensor],
    parts: list[dict[str, Any]],
    contexts: list[Any],
    second: ThreadPoolExecutor,
    prepare_thread: Callable[[], None],
    turn_s: float,
) -> torch.Tensor:
    """Both halves' outputs, one behind the other. Part 1 runs in the thread of `second`, which
    calls `prepare_thread` first. Raises what stopped either of them; then neither is still running,
    but for one that has kept its turn for more than `turn_s`.
    """
    turns = Turns(HALVES, turn_s)

    @torch.inference_mode()
    def half(i: int) -> torch.Tensor:
        def resume() -> None:
            forward_context._forward_context = contexts[i]

        thread = threading.get_ident()
        try:
            with taking(turns, i, resume):
                if i:
                    prepare_thread()
                # Where vLLM looks whose scratch memory and shared experts' output to use.
                ubatching._THREAD_ID_TO_CONTEXT[thread] = i
                return model(**parts[i])
        finally:
            ubatching._THREAD_ID_TO_CONTEXT.pop(thread, None)

    other = second.submit(half, 1)
    try:
        mine = half(0)
    except BaseException as error:
        ended = wait([other], turn_s).done  # it fails when its turn should come
        if ended and isinstance(error, PartnerFailed):
            other.result()  # raises what stopped it
        raise
    if not wait([other], turn_s).done:
        raise TimeoutError(f"number 1 has not ended {turn_s:g} s after number 0")
    return torch.cat([mine, other.result()])
