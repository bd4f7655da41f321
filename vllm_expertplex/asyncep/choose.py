"""Choosing among labels with one forward pass: the Python call, for any of vLLM's EngineClients.

Owns: turning a choice into one-token reads that run together. Must not know: HTTP.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from vllm.entrypoints.generate.label_reads import LabelRead, next_token_label_reads
from vllm.inputs import tokens_input
from vllm.sampling_params import SamplingParams
from vllm.utils import random_uuid

from vllm_expertplex.asyncep import tags
from vllm_expertplex.asyncep.labels import LabelSet, normalise


class Choice(NamedTuple):
    """logprobs: the model's own, of each label after the prompt. probabilities: within the set."""

    logprobs: list[float]
    probabilities: list[float]
    prompt_tokens: int  # of all reads
    cached_tokens: int  # of those, found in a KV cache


async def choose(
    engine: Any,
    prompts: Sequence[Sequence[int]],
    labels: LabelSet,
    *,
    request_id: str | None = None,
    cache_salt: str | None = None,
) -> list[Choice]:
    """For each prompt, the probabilities of `labels` as what follows it.

    One prompt is a single choice; several that differ at their ends are the binary siblings of a
    multi-selection. All reads go to one engine and run in one batch. `engine` is an EngineClient:
    an AsyncLLM, of AsyncEP or not. Raises ValueError for prompts that vLLM refuses.
    """
    request_id = request_id or f"choose-{random_uuid()}"
    size = len(prompts) * len(labels.reads)
    inputs, parameters = [], []
    for prompt in prompts:
        for read in labels.reads:
            tokens = tokens_input([*prompt, *read.after])
            if cache_salt is not None:
                tokens["cache_salt"] = cache_salt
            inputs.append(tokens)
            parameters.append(
                SamplingParams(
                    max_tokens=1,
                    # The logprobs are of the whole vocabulary, before any processing; what is
                    # sampled does not matter.
                    logprob_token_ids=list(read.tokens),
                    detokenize=False,
                    extra_args=tags.group(request_id, size) if size > 1 else None,
                )
            )
    answers = await _read_all(engine, inputs, parameters, request_id)
    per_prompt = len(labels.reads)
    return [
        _choice(labels, answers[start : start + per_prompt])
        for start in range(0, len(answers), per_prompt)
    ]


async def _read_all(
    engine: Any, inputs: list[Any], parameters: list[SamplingParams], request_id: str
) -> list[LabelRead]:
    reading = asyncio.ensure_future(next_token_label_reads(engine, inputs, parameters, request_id))
    try:
        return await reading
    except BaseException:
        # One read was refused, or the caller gave up: its siblings would wait for it.
        reading.cancel()
        await engine.abort([f"{request_id}-{index}" for index in range(len(inputs))])
        raise


def _choice(labels: LabelSet, answers: Sequence[LabelRead]) -> Choice:
    logprobs = labels.logprobs([answer.logprobs for answer in answers])
    return Choice(
        logprobs,
        normalise(logprobs),
        sum(len(answer.result.prompt_token_ids or ()) for answer in answers),
        sum(answer.result.num_cached_tokens or 0 for answer in answers),
    )
