"""The index says of every prompt what an engine's cache, driven by the same events, would hit."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_expertplex.client.prefixes import PrefixIndex

_SIZE = 2
_PROMPTS = st.lists(st.integers(0, 1), max_size=9)


class _Cache:
    """An engine's prefix cache: the truth the index is compared with."""

    def __init__(self, index: PrefixIndex) -> None:
        self.index = index
        self.blocks: dict[tuple[int, ...], str] = {}  # all tokens up to the block's end -> name
        self.names = 0

    def store(self, prompt: list[int]) -> None:
        """Compute a prompt: report its new blocks, as vLLM does, in one run after its parent."""
        ends = list(range(_SIZE, len(prompt) + 1, _SIZE))
        new = [end for end in ends if tuple(prompt[:end]) not in self.blocks]
        if not new:
            return
        first = new[0]
        new = [end for end in ends if end >= first]
        fresh = [f"hash{self.names + i}" for i in range(len(new))]
        self.names += len(new)
        parent = self.blocks.get(tuple(prompt[: first - _SIZE])) if first > _SIZE else None
        if first > _SIZE and parent is None:
            return
        for end, name in zip(new, fresh, strict=True):
            old = self.blocks.pop(tuple(prompt[:end]), None)
            if old is not None:
                self.index.removed(0, [old])
            self.blocks[tuple(prompt[:end])] = name
        self.index.stored(0, fresh, parent, prompt[first - _SIZE : new[-1]])

    def evict(self, which: int) -> None:
        if self.blocks:
            prompt = list(self.blocks)[which % len(self.blocks)]
            self.index.removed(0, [self.blocks.pop(prompt)])

    def hit(self, prompt: list[int]) -> int:
        tokens = 0
        while tokens + _SIZE <= len(prompt) and tuple(prompt[: tokens + _SIZE]) in self.blocks:
            tokens += _SIZE
        return tokens


@given(st.lists(st.tuples(_PROMPTS, st.integers(0, 9)), max_size=30), _PROMPTS)
def test_the_index_follows_the_cache(steps: list[tuple[list[int], int]], asked: list[int]) -> None:
    index = PrefixIndex([0, 1], _SIZE)
    cache = _Cache(index)
    for prompt, action in steps:
        if action < 7:
            cache.store(prompt)
        else:
            cache.evict(action)
        assert index.cached(0, index.keys(asked)) == cache.hit(asked)
        assert index.blocks(0) == len(cache.blocks)
    assert index.cached(1, index.keys(asked)) == 0
    index.cleared(0)
    assert index.cached(0, index.keys(asked)) == 0


@given(st.lists(_PROMPTS, max_size=10), _PROMPTS)
def test_what_was_promised_counts_until_it_is_settled(
    prompts: list[list[int]], asked: list[int]
) -> None:
    index = PrefixIndex([0], _SIZE)
    for prompt in prompts:
        index.promise(0, index.keys(prompt))
    best = max((_common_blocks(prompt, asked) for prompt in prompts), default=0)
    assert index.cached(0, index.keys(asked)) == best
    for prompt in prompts:
        index.settle(0, index.keys(prompt))
    assert index.cached(0, index.keys(asked)) == 0


def _common_blocks(a: list[int], b: list[int]) -> int:
    tokens = 0
    while a[tokens : tokens + _SIZE] == b[tokens : tokens + _SIZE] and (
        tokens + _SIZE <= min(len(a), len(b))
    ):
        tokens += _SIZE
    return tokens


def test_another_root_shares_nothing() -> None:
    index = PrefixIndex([0], _SIZE)
    index.stored(0, ["a"], None, [1, 2], root=("salt",))
    assert index.cached(0, index.keys([1, 2])) == 0
    assert index.cached(0, index.keys([1, 2], root=("salt",))) == 2


def test_a_block_after_an_unknown_one_is_not_taken_for_a_first_one() -> None:
    index = PrefixIndex([0], _SIZE)
    index.stored(0, ["b"], "never seen", [1, 2])
    assert index.cached(0, index.keys([1, 2])) == 0


def test_the_last_words_of_a_lost_engine_do_no_harm() -> None:
    index = PrefixIndex([0, 1], _SIZE)
    keys = index.keys([1, 2])
    index.promise(0, keys)
    index.drop(0)
    index.stored(0, ["a"], None, [1, 2])
    index.removed(0, ["a"])
    index.cleared(0)
    index.settle(0, keys)
    assert index.blocks(0) == 0
    assert index.cached(1, keys) == 0
