"""The requests of the parity suite, as data: what a user may ask for, and at which lengths."""

from typing import Any, NamedTuple

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = "class Scheduler:\n    def"
CONCURRENT = 16


class Case(NamedTuple):
    """One request. Cases of a `group` form one column of the table."""

    group: str
    name: str
    path: str
    body: dict[str, Any]
    contains: str = ""  # must be in the answer's text: sense, not only equality


class Probe(NamedTuple):
    """What the model says to `PROMPT`; stop conditions are built from it."""

    ids: list[int]
    tokens: list[str]


PROBE = Case(
    "greedy",
    "probe",
    COMPLETIONS,
    {
        "prompt": PROMPT,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "logprobs": 3,
    },
)


def probe_of(response: dict[str, Any]) -> Probe:
    """The `Probe` in the response to `PROBE`."""
    choice = response["choices"][0]
    return Probe(choice["token_ids"], choice["logprobs"]["tokens"])


def _completion(group: str, name: str, **body: Any) -> Case:
    return Case(group, name, COMPLETIONS, {**PROBE.body, **body})


def _chat(group: str, name: str, question: str, contains: str = "", **body: Any) -> Case:
    common = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 24,
        "temperature": 0,
        "return_token_ids": True,
        "logprobs": True,
        "top_logprobs": 2,
    }
    return Case(group, name, CHAT, common | body, contains)


def _numbers(first: int, length: int) -> list[int]:
    """A prompt of `length` token ids that shares no prefix with one of another `first`."""
    return [first, *(100 + (first * 31 + i * 7) % 3000 for i in range(1, length))]


_SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 7}
_SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 9},
        "b": {"type": "string", "maxLength": 6},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
_JSON = {"type": "json_schema", "json_schema": {"name": "pair", "schema": _SCHEMA}}
_PENALTIES = {"presence_penalty": 1.5, "frequency_penalty": 1.2, "repetition_penalty": 1.3}


def _stops(probe: Probe) -> list[Case]:
    ids, tokens = probe
    # A stop string over the border of two tokens: from the end of one into the next.
    border = next(i for i in range(1, len(tokens)) if "\ufffd" not in tokens[i - 1] + tokens[i])
    spanning = tokens[border - 1][-1] + tokens[border][:1]
    second = next(token for token in tokens[1:] if "\ufffd" not in token)
    return [
        _completion("stop", "first token", stop=[tokens[0]]),
        _completion("stop", "later token", stop=[second]),
        _completion("stop", "spanning two tokens", stop=[spanning]),
        _completion("stop", "included", stop=[second], include_stop_str_in_output=True),
        _completion("stop", "first id", stop_token_ids=[ids[0]]),
        _completion("stop", "second id", stop_token_ids=[ids[1]]),
        _completion("min_tokens", "1", min_tokens=1, stop_token_ids=[ids[0], ids[1]]),
        _completion("min_tokens", "2", min_tokens=2, stop_token_ids=[ids[0], ids[1]]),
        _completion("min_tokens", "6", min_tokens=6, stop_token_ids=[ids[0], ids[3]]),
    ]


def cases(probe: Probe) -> list[Case]:
    """The features, each a short request; every one is sent with and without streaming."""
    ids, tokens = probe
    return [
        _completion("greedy", "completion"),
        _completion("greedy", "text only", logprobs=None, return_token_ids=False),
        _chat("greedy", "chat", "Say hello."),
        _completion("sampling", "seed", **_SEEDED),
        _completion("sampling", "top_k top_p min_p", **_SEEDED, top_k=40, top_p=0.9, min_p=0.01),
        _completion("sampling", "non-ASCII", **_SEEDED, prompt="é漢字🙂"),
        _chat("sampling", "chat", "Tell me a story.", **_SEEDED),
        _completion("penalties", "greedy", **_PENALTIES, max_tokens=24),
        _completion("penalties", "seed", **_PENALTIES, **_SEEDED, max_tokens=24),
        _completion("n", "2 seeded", n=2, **_SEEDED),
        _completion("n", "3 seeded", n=3, **_SEEDED, max_tokens=6),
        _completion("logprobs", "0", logprobs=0),
        _completion("logprobs", "20", logprobs=20),
        _completion("prompt_logprobs", "2", prompt_logprobs=2),
        _completion("prompt_logprobs", "several chunks", prompt_logprobs=1,
                    prompt=_numbers(50, 700), max_tokens=2),
        _completion("echo", "with logprobs", echo=True),
        _completion("echo", "text", echo=True, logprobs=None),
        *_stops(probe),
        _completion("max_tokens", "1", max_tokens=1),
        _completion("max_tokens", "2", max_tokens=2),
        _completion("max_tokens", "1 seeded", max_tokens=1, **_SEEDED),
        _completion("constrained", "logit_bias", logit_bias={str(ids[0]): -100, str(ids[5]): 5}),
        _completion("constrained", "bad_words", bad_words=[tokens[1]]),
        _completion("constrained", "allowed ids", allowed_token_ids=list(range(100, 200)),
                    **_SEEDED),
        _chat("structured", "JSON schema", "x", response_format=_JSON, max_tokens=48),
        _chat("structured", "JSON schema seeded", "x", response_format=_JSON, max_tokens=48,
              **_SEEDED),
        _completion("structured", "regex", structured_outputs={"regex": "[ab]{3}[0-9]{4}"},
                    ignore_eos=False),
        _completion("structured", "choice", structured_outputs={"choice": ["yes", "no"]},
                    ignore_eos=False),
        _completion("refused", "temperature -1", temperature=-1),
        _completion("refused", "prompt too long", prompt=_numbers(51, 2049)),
    ]  # fmt: skip


def length_cases() -> list[Case]:
    """Prompts from one token to several chunks of 512, around multiples of 16, 128 and 512.

    Prompts differ from their first token on; only the prefix-cache cases share any.
    """
    lengths = (1, 2, 15, 16, 17, 127, 128, 129, 256, 511, 512, 513, 1024, 1025, 1500)
    prompts = [
        _completion("lengths", f"{n} tokens", prompt=_numbers(60 + i, n), max_tokens=6)
        for i, n in enumerate(lengths)
    ]
    seeded = [
        _completion("lengths", f"{n} tokens seeded", prompt=_numbers(80 + i, n), max_tokens=6,
                    **_SEEDED)
        for i, n in enumerate((128, 1025))
    ]  # fmt: skip
    full = [
        _completion("lengths", "context filled", prompt=_numbers(85, 2040), max_tokens=None),
        _completion("lengths", "context filled at once", prompt=_numbers(86, 2047), max_tokens=1),
    ]
    shared = _numbers(90, 256)
    prefix = [
        _completion("prefix cache", name, prompt=prompt, max_tokens=6)
        for name, prompt in (
            ("first", [*shared, 300]),
            ("repeated", [*shared, 300]),
            ("shared prefix", [*shared, *_numbers(91, 40)]),
            ("exact blocks", shared),
            ("exact blocks repeated", shared),
        )
    ]
    return prompts + seeded + full + prefix


def concurrent_cases() -> list[Case]:
    """Requests to send all at once."""
    return [
        _completion("16 prompts", str(i), prompt=_numbers(10 + i, 5 + 19 * i), max_tokens=12)
        for i in range(CONCURRENT)
    ]


def sense_cases() -> list[Case]:
    """For the model that speaks English: equal answers must also be right ones."""
    return [
        _chat("sense", "capital", "What is the capital of France?", contains="Paris"),
        _chat("sense", "colors", "Name three primary colors.", contains="ed"),
        _chat("sense", "sum", "What is 2+2?", contains="4"),
    ]
