"""What is sent: prompts of exactly given lengths, and the targets they have to meet.

A prompt is random words that are one token each, so no two requests share a prefix and every
server counts the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vllm_expertplex.planner.workload import Lengths, Targets, load_workload, read_trace

_DRAWN = 50_000  # lengths; texts are made as they are asked for


class Prompt(NamedTuple):
    text: str
    tokens: int
    output: int  # tokens to be generated


class Workload(NamedTuple):
    """A workload as the command line names it."""

    name: str
    start: float  # requests per second that the search begins with
    targets: Targets


def parse(text: str, start: float, targets: Targets) -> Workload:
    """`NAME[@START[,TTFT,TPOT]]`; what is left out is as given. Raises ValueError."""
    name, at, rest = text.partition("@")
    if not at:
        return Workload(name, start, targets)
    numbers = rest.split(",")
    if len(numbers) not in (1, 3):
        raise ValueError(
            f"workload {text!r}: expected NAME, NAME@START, or NAME@START,TTFT,TPOT "
            "(requests per second, and targets in seconds)"
        )
    first, *given = map(float, numbers)
    return Workload(name, first, Targets(*given) if given else targets)


def lengths(text: str, count: int, seed: int) -> tuple[Lengths, Lengths]:
    """Prompt and output lengths of `count` requests: `IN/OUT` exactly, pairs drawn from a trace
    file, or a named workload of the planner.
    """
    first, slash, second = text.partition("/")
    if slash and first.isdigit() and second.isdigit():
        return np.full(count, int(first)), np.full(count, int(second))
    rng = np.random.default_rng(seed)
    if Path(text).expanduser().is_file():
        inputs, outputs, _ = read_trace(text)
        drawn = rng.integers(0, len(inputs), count)
        return inputs[drawn], outputs[drawn]
    return load_workload(text).sample(count, rng)


def one_token_words(tokenizer: Any, wanted: int = 2000) -> list[str]:
    """Words that are one token after a space, and stay one between others."""
    words = []
    for token in range(len(tokenizer)):
        word = tokenizer.decode([token])
        if not (word.startswith(" ") and word[1:].isalpha() and word.isascii()):
            continue
        if tokenizer.encode(word * 2, add_special_tokens=False) == [token] * 2:
            words.append(word)
        if len(words) == wanted:
            break
    if len(words) < 100:
        raise ValueError(f"the tokenizer has only {len(words)} words of one token, 100 are needed")
    return words


class Prompts:
    """The requests of one workload, the same for every system and rate.

    Requests beyond `longest` tokens (prompt and output) are left out, and `progress` is told how
    many. Raises ValueError where nearly all are.
    """

    def __init__(
        self,
        tokenizer: Any,
        workload: str,
        longest: int,
        seed: int,
        progress: Callable[[str], None] = print,
    ) -> None:
        inputs, outputs = lengths(workload, _DRAWN, seed)
        self._special = len(tokenizer.encode(""))
        fits = (inputs + outputs <= longest) & (inputs > self._special)
        if fits.mean() < 0.05:
            raise ValueError(
                f"workload {workload}: {fits.mean():.0%} of its requests fit into {longest} "
                "tokens, too few; raise --max-model-len"
            )
        if not fits.all():
            progress(f"{workload}: {1 - fits.mean():.1%} of the requests exceed {longest} tokens")
        self._lengths = list(zip(inputs[fits].tolist(), outputs[fits].tolist(), strict=True))
        self._words = one_token_words(tokenizer)
        self._rng = np.random.default_rng(seed)
        self._made: list[Prompt] = []

    def first(self, count: int) -> list[Prompt]:
        """The first `count` of them; raises ValueError where so many were never drawn."""
        if count > len(self._lengths):
            raise ValueError(f"{count} requests are wanted, only {len(self._lengths)} were drawn")
        for tokens, output in self._lengths[len(self._made) : count]:
            drawn = self._rng.integers(0, len(self._words), tokens - self._special)
            self._made.append(Prompt("".join(self._words[i] for i in drawn), tokens, output))
        return self._made[:count]
