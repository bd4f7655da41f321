"""Two-batch overlap: a prefill step runs as two microbatches, one's attention while the MoE servers
have the other (ExpertPlex section 5).

Owns: which steps are cut in two, and the threads that run the halves.
Must not know: transports, MoE servers, where halves give way.

vLLM cuts steps (attention metadata, slot mappings) for its dual-batch overlap, but only for data
parallelism, with an all-to-all of its own (v1/worker/gpu_ubatch_wrapper.py). Here the halves need
no second stream: what they wait for happens on other GPUs, so both queue their kernels on one
stream, and the wait for one half's experts comes behind the other half's attention.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch
from vllm import forward_context
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.worker import ubatching
from vllm.v1.worker.gpu_ubatch_wrapper import UBatchWrapper

from vllm_expertplex.executor.turns import PartnerFailed, Turns, taking

HALVES = 2
# Between two turns a half queues the kernels of one layer; compiling some of them takes seconds.
_TURN_S = 120.0


def prepare(vllm_config: VllmConfig) -> None:
    """Make vLLM's worker build what two halves need: workspaces, metadata builders.

    Before the worker initialises its device. Raises ValueError for models that cannot be cut.
    """
    if vllm_config.model_config.is_multimodal_model:
        raise ValueError(
            f"tbo_tokens: {vllm_config.model_config.model} takes more than text, and its steps "
            "cannot be cut in two; set tbo_tokens = 0"
        )
    # Not sooner: vLLM refuses the option where its own all-to-all is not in use.
    vllm_config.parallel_config.enable_dbo = True


def install(runner: Any, vllm_config: VllmConfig, tokens: int) -> None:
    """Cut steps of at least `tokens` tokens of `runner`, a GPUModelRunner that has its model."""
    runner.model = Halves(runner.get_model(), vllm_config, CUDAGraphMode.NONE, runner.device)
    runner._determine_batch_execution_and_padding = cutting(
        runner._determine_batch_execution_and_padding, tokens
    )


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


class Halves(UBatchWrapper):
    """A model that runs the steps which vLLM has cut as two halves that take turns.

    The first half runs in the caller's thread.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._second = ThreadPoolExecutor(1, thread_name_prefix="microbatch")

    def __call__(self, *args: Any, **inputs: Any) -> torch.Tensor:
        whole = forward_context.get_forward_context()
        if whole.ubatch_slices is None:
            return self.runnable(*args, **inputs)
        contexts = [self._context(whole, i) for i in range(HALVES)]
        parts = [sliced(inputs, part.token_slice) for part in whole.ubatch_slices]
        stream = torch.cuda.current_stream()

        def use_device() -> None:
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(stream)

        try:
            return run_in_turns(self.runnable, parts, contexts, self._second, use_device)
        finally:
            forward_context._forward_context = whole

    def _context(self, whole: forward_context.ForwardContext, i: int) -> Any:
        assert whole.ubatch_slices is not None
        attention, slots, padding = whole.attn_metadata, whole.slot_mapping, whole.is_padding
        return forward_context.create_forward_context(
            attention[i] if attention is not None else None,
            self.vllm_config,
            batch_descriptor=whole.batch_descriptor,
            slot_mapping=slots[i] if isinstance(slots, list) else None,
            is_padding=None if padding is None else padding[whole.ubatch_slices[i].token_slice],
        )


def sliced(inputs: dict[str, Any], tokens: slice) -> dict[str, Any]:
    """The inputs of one half: of every tensor the tokens' part."""
    return {n: v[tokens] if isinstance(v, torch.Tensor) else v for n, v in inputs.items()}


def run_in_turns(
    model: Callable[..., torch.Tensor],
    parts: list[dict[str, Any]],
    contexts: list[Any],
    second: ThreadPoolExecutor,
    use_device: Callable[[], None],
) -> torch.Tensor:
    """Both halves' outputs, one behind the other. Part 1 runs in the thread of `second`, which
    calls `use_device` first. Raises what stopped either of them; then neither is still running.
    """
    turns = Turns(HALVES, _TURN_S)

    @torch.inference_mode()
    def half(i: int) -> torch.Tensor:
        def resume() -> None:
            forward_context._forward_context = contexts[i]

        thread = threading.get_ident()
        try:
            with taking(turns, i, resume):
                # Where vLLM looks whose scratch memory and shared experts' output to use.
                ubatching._THREAD_ID_TO_CONTEXT[thread] = i
                return model(**parts[i])
        finally:
            ubatching._THREAD_ID_TO_CONTEXT.pop(thread, None)

    def in_thread() -> torch.Tensor:
        use_device()
        return half(1)

    other = second.submit(in_thread)
    try:
        mine = half(0)
    except PartnerFailed:
        other.result()  # raises what stopped it
        raise
    finally:
        wait([other])
    return torch.cat([mine, other.result()])
