"""`POST /v1/choose`: probabilities of labels, and of options that may apply together.

Owns: the request and its answer in JSON, prompts from text and chat messages.
Must not know: engines beyond vLLM's EngineClient.
"""

import time
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.entrypoints.serve.utils.api_utils import with_cancellation

from vllm_expertplex.asyncep.choose import Choice, choose
from vllm_expertplex.asyncep.labels import LabelSet

_QUESTION = "\nDoes this apply: {option}? Answer yes or no.\nAnswer:"
_YES_NO = [" yes", " no"]


class ChooseRequest(BaseModel):
    """Give `prompt` or `messages`, and `labels` (one applies) or `options` (any may apply)."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = Field(
        None, description="Chat messages, put together by the model's chat template."
    )
    labels: list[str] | list[list[int]] | None = Field(
        None,
        description="The answers to choose from, as text or token ids, exactly as they follow.",
    )
    options: list[str] | None = Field(
        None, description="Options of a multi-selection: each is asked about on its own."
    )
    question: str = Field(
        _QUESTION, description="What asks about one {option}; it follows the prompt."
    )
    answers: list[str] = Field(
        _YES_NO, description="Two labels: that an option applies, and that it does not."
    )
    threshold: float = Field(0.5, ge=0, le=1, description="Probability that selects an option.")
    add_special_tokens: bool = True
    cache_salt: str | None = None


class ServingChoose(BaseServing):
    """Answers a `ChooseRequest`; ValueError becomes HTTP 400 with the same words."""

    def __init__(self, engine: Any, models: Any) -> None:
        super().__init__(models, engine.model_config)
        self._engine = engine

    async def answer(self, request: ChooseRequest) -> dict[str, Any]:
        if (request.labels is None) == (request.options is None):
            raise ValueError("give either labels (one applies) or options (any may apply)")
        if request.labels is not None:
            return await self._single(request, request.labels)
        return await self._multiple(request, request.options or [])

    async def _single(
        self, request: ChooseRequest, given: list[str] | list[list[int]]
    ) -> dict[str, Any]:
        names = [label if isinstance(label, str) else str(label) for label in given]
        labels = LabelSet([self._label(label) for label in given], names)
        (choice,) = await self._choose(request, [self._prompt(request, "")], labels)
        rows = [
            {"label": label, "probability": p, "logprob": logprob}
            for label, p, logprob in zip(given, choice.probabilities, choice.logprobs, strict=True)
        ]
        best = max(rows, key=lambda row: row["probability"])  # type: ignore[arg-type,return-value]
        return self._response([choice], label=best["label"], labels=rows)

    async def _multiple(self, request: ChooseRequest, options: list[str]) -> dict[str, Any]:
        if not options:
            raise ValueError("options is empty; give at least one")
        if "{option}" not in request.question:
            raise ValueError(f"question {request.question!r} lacks {{option}}")
        if len(request.answers) != 2:
            raise ValueError(f"{len(request.answers)} answers given; expected yes and no")
        labels = LabelSet([self._label(text) for text in request.answers], request.answers)
        prompts = [
            self._prompt(request, request.question.replace("{option}", option))
            for option in options
        ]
        choices = await self._choose(request, prompts, labels)
        rows = [
            {
                "option": option,
                "selected": choice.probabilities[0] >= request.threshold,
                "probability": choice.probabilities[0],
                "logprobs": dict(zip(request.answers, choice.logprobs, strict=True)),
            }
            for option, choice in zip(options, choices, strict=True)
        ]
        return self._response(choices, options=rows)

    async def _choose(
        self, request: ChooseRequest, prompts: list[list[int]], labels: LabelSet
    ) -> list[Choice]:
        if self._engine.errored:
            raise self._engine.dead_error
        return await choose(self._engine, prompts, labels, cache_salt=request.cache_salt)

    def _prompt(self, request: ChooseRequest, question: str) -> list[int]:
        tokenizer = self._tokenizer
        if (request.prompt is None) == (request.messages is None):
            raise ValueError("give either prompt or messages")
        if request.messages is not None:
            messages = [*request.messages]
            if question:
                last = messages[-1] if messages else {}
                if not isinstance(last.get("content"), str):
                    raise ValueError("options need a last message whose content is text")
                messages[-1] = {**last, "content": last["content"] + question}
            return list(
                tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=True, return_dict=False
                )
            )
        if isinstance(request.prompt, list):
            # The question is tokenised on its own: what precedes it is the same for all options.
            return [*request.prompt, *self._label(question)] if question else request.prompt
        special = request.add_special_tokens
        return list(tokenizer.encode(f"{request.prompt}{question}", add_special_tokens=special))

    def _label(self, label: str | list[int]) -> list[int]:
        if isinstance(label, list):
            size = self.model_config.get_vocab_size()
            if wrong := [token for token in label if not 0 <= token < size]:
                raise ValueError(f"label tokens {wrong}: expected ids below {size}")
            return label
        return list(self._tokenizer.encode(label, add_special_tokens=False))

    @property
    def _tokenizer(self) -> Any:
        tokenizer = self._engine.renderer.tokenizer
        if tokenizer is None:
            raise ValueError("the server runs without a tokenizer; give token ids")
        return tokenizer

    def _response(self, choices: list[Choice], **fields: Any) -> dict[str, Any]:
        tokens = sum(choice.prompt_tokens for choice in choices)
        cached = sum(choice.cached_tokens for choice in choices)
        return {
            "object": "choice",
            "created": int(time.time()),
            "model": self.models.model_name(None),
            **fields,
            "usage": {
                "prompt_tokens": tokens,
                "total_tokens": tokens,
                "prompt_tokens_details": {"cached_tokens": cached},
            },
        }


def attach(app: FastAPI) -> None:
    """Add the endpoint to vLLM's app."""

    @app.post("/v1/choose")
    @with_cancellation
    async def choose_among(request: ChooseRequest, raw_request: Request) -> JSONResponse:
        """Probabilities of `labels` after a prompt, or of each of `options` that may apply."""
        state = raw_request.app.state
        serving = ServingChoose(state.engine_client, state.openai_serving_models)
        if (error := await serving._check_model(request)) is not None:  # type: ignore[arg-type]
            return JSONResponse(error.model_dump(), status_code=error.error.code)
        try:
            return JSONResponse(await serving.answer(request))
        except ValueError as invalid:
            refusal = serving.create_error_response(invalid, status_code=HTTPStatus.BAD_REQUEST)
            return JSONResponse(refusal.model_dump(), status_code=refusal.error.code)
