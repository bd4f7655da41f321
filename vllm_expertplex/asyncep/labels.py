"""Labels as token sequences, and the probability of each from one-token reads.

Owns: which prompts must be read for a set of labels, and the exact probability of a label.
Must not know: engines, HTTP.

A label of tokens t1..tn has probability p(t1 | prompt) p(t2 | prompt t1) ... Every factor is one
read of the next-token distribution. Labels that begin alike share reads: labels of one token each
need a single one. All reads of a set share the prompt as prefix.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

Label = tuple[int, ...]

MAX_CHILDREN = 128  # vLLM's limit on tokens scored in one read


class Read(NamedTuple):
    """Read the logprobs of `tokens` after the prompt and `after`."""

    after: Label
    tokens: tuple[int, ...]


class LabelSet:
    """Raises ValueError for labels whose probabilities would not be those of distinct answers."""

    def __init__(self, labels: Sequence[Sequence[int]], names: Sequence[str] | None = None) -> None:
        self.labels: list[Label] = [tuple(label) for label in labels]
        named = list(names) if names is not None else [str(list(label)) for label in labels]
        _check(self.labels, named)
        children: dict[Label, list[int]] = {}
        for label in self.labels:
            for position, token in enumerate(label):
                tokens = children.setdefault(label[:position], [])
                if token not in tokens:
                    tokens.append(token)
        crowded = max(len(tokens) for tokens in children.values())
        if crowded > MAX_CHILDREN:
            raise ValueError(
                f"{crowded} labels differ in the same token; at most {MAX_CHILDREN} can be told "
                "apart in one read: ask in several requests"
            )
        self.reads = [Read(after, tuple(tokens)) for after, tokens in children.items()]

    def logprobs(self, answers: Sequence[Sequence[float]]) -> list[float]:
        """The logprob of each label, from the answers to `reads` in order."""
        found = {
            (read.after, token): value
            for read, values in zip(self.reads, answers, strict=True)
            for token, value in zip(read.tokens, values, strict=True)
        }
        return [
            math.fsum(found[label[:position], token] for position, token in enumerate(label))
            for label in self.labels
        ]


def _check(labels: Sequence[Label], names: Sequence[str]) -> None:
    if len(labels) < 2:
        raise ValueError(f"{len(labels)} label given; a choice needs at least two")
    for label, name in zip(labels, names, strict=True):
        if not label:
            raise ValueError(f"label {name!r} has no tokens")
    for i, (label, name) in enumerate(zip(labels, names, strict=True)):
        for other, other_name in list(zip(labels, names, strict=True))[i + 1 :]:
            short = min(len(label), len(other))
            if label[:short] == other[:short]:
                same = (
                    "have the same tokens"
                    if len(label) == len(other)
                    else ("cannot be told apart: one's tokens begin with the other's")
                )
                raise ValueError(
                    f"labels {name!r} and {other_name!r} {same}; end each with what follows the "
                    "answer, for example a newline or a full stop"
                )


def normalise(logprobs: Sequence[float]) -> list[float]:
    """Probabilities within a set of labels: softmax. They add up to 1."""
    top = max(logprobs)
    if top == -math.inf:
        return [1 / len(logprobs)] * len(logprobs)
    weights = [math.exp(value - top) for value in logprobs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]
