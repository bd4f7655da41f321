"""Label probabilities are those of the token sequences, whatever labels share."""

import itertools
import math
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vllm_expertplex.asyncep.labels import MAX_CHILDREN, LabelSet, normalise

_LABELS = st.lists(
    st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple),
    min_size=2,
    max_size=8,
    unique=True,
)


def _distribution(after: tuple[int, ...]) -> list[float]:
    """A made-up model over four tokens: the next token's probabilities."""
    generator = random.Random(str(after))
    weights = [generator.random() + 0.01 for _ in range(4)]
    return [weight / sum(weights) for weight in weights]


def _starts_another(labels: list[tuple[int, ...]]) -> bool:
    return any(a != b and b[: len(a)] == a for a, b in itertools.permutations(labels, 2))


@given(_LABELS)
def test_a_label_has_the_probability_of_its_tokens(labels: list[tuple[int, ...]]) -> None:
    assume(not _starts_another(labels))
    choices = LabelSet(labels)
    answers = [
        [math.log(_distribution(read.after)[token]) for token in read.tokens]
        for read in choices.reads
    ]
    for label, logprob in zip(labels, choices.logprobs(answers), strict=True):
        factors = [_distribution(label[:i])[token] for i, token in enumerate(label)]
        assert logprob == pytest.approx(math.log(math.prod(factors)))


@given(_LABELS)
def test_every_position_is_read_once(labels: list[tuple[int, ...]]) -> None:
    assume(not _starts_another(labels))
    reads = LabelSet(labels).reads
    assert len({read.after for read in reads}) == len(reads)
    assert sum(len(r.tokens) for r in reads) == len(
        {label[: i + 1] for label in labels for i in range(len(label))}
    )


def test_labels_of_one_token_need_one_read() -> None:
    (read,) = LabelSet([[5], [7], [9]]).reads
    assert read == ((), (5, 7, 9))


@given(_LABELS)
def test_labels_that_begin_another_are_refused(labels: list[tuple[int, ...]]) -> None:
    assume(_starts_another(labels))
    with pytest.raises(ValueError, match="cannot be told apart"):
        LabelSet(labels)


@pytest.mark.parametrize(
    ("labels", "reason"),
    [
        ([[1]], "at least two"),
        ([[1], []], "has no tokens"),
        ([[1, 2], [1, 2]], "have the same tokens"),
        ([[i] for i in range(MAX_CHILDREN + 1)], "differ in the same token"),
    ],
)
def test_what_is_no_choice_is_refused(labels: list[list[int]], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        LabelSet(labels)


@given(st.lists(st.floats(-700, 0), min_size=2, max_size=10))
def test_probabilities_add_up_and_keep_the_order(logprobs: list[float]) -> None:
    found = normalise(logprobs)
    assert math.fsum(found) == pytest.approx(1)
    for (a, p), (b, q) in itertools.combinations(zip(logprobs, found, strict=True), 2):
        assert (a <= b) == (p <= q) or math.isclose(p, q)


def test_impossible_labels_are_equally_likely() -> None:
    assert normalise([-math.inf, -math.inf]) == [0.5, 0.5]
