"""Which prefixes each engine's KV cache holds, in blocks of tokens.

Owns: the index, kept up by the engines' own KV events and by what was promised to them.
Must not know: sockets, requests, load.

A block is named by the hash of its tokens and of all blocks before it. Engines use hashes of their
own; events carry the tokens, so the index makes its own names and translates.
"""

from collections import Counter
from collections.abc import Hashable, Sequence

Key = int


class PrefixIndex:
    """Blocks of `block_size` tokens per engine.

    A block counts as held from the moment a request with it is sent to an engine (`promise`): vLLM
    finds it there even within the same step. Once the engine reports it, only its events count.
    """

    def __init__(self, engines: Sequence[int], block_size: int) -> None:
        if block_size < 1:
            raise ValueError(f"block size {block_size}: expected at least 1 token")
        self.block_size = block_size
        self._held: dict[int, dict[Hashable, Key]] = {engine: {} for engine in engines}
        self._keys: dict[int, Counter[Key]] = {engine: Counter() for engine in engines}
        self._promised: dict[int, Counter[Key]] = {engine: Counter() for engine in engines}

    def keys(self, tokens: Sequence[int], root: Hashable = None) -> list[Key]:
        """Names of the whole blocks of a prompt. Prompts with different roots share nothing."""
        return self._chain(hash(root), tokens, self.block_size)

    @staticmethod
    def _chain(parent: Key, tokens: Sequence[int], block_size: int) -> list[Key]:
        found = []
        for start in range(0, len(tokens) - block_size + 1, block_size):
            parent = hash((parent, *tokens[start : start + block_size]))
            found.append(parent)
        return found

    def cached(self, engine: int, keys: Sequence[Key]) -> int:
        """Tokens at the start of a prompt that `engine` need not compute."""
        held, promised = self._keys[engine], self._promised[engine]
        blocks = 0
        for key in keys:
            if not (held[key] or promised[key]):
                break
            blocks += 1
        return blocks * self.block_size

    def promise(self, engine: int, keys: Sequence[Key]) -> None:
        """A request with these blocks goes to `engine`."""
        self._promised[engine].update(keys)

    def settle(self, engine: int, keys: Sequence[Key]) -> None:
        """That request has been computed, or never will be: the engine's events tell the rest."""
        if engine in self._promised:
            _subtract(self._promised[engine], keys)

    def stored(
        self,
        engine: int,
        hashes: Sequence[Hashable],
        parent: Hashable | None,
        tokens: Sequence[int],
        root: Hashable = None,
    ) -> None:
        """An engine reports blocks, named by its own hashes, that follow the block `parent`."""
        held = self._held.get(engine)
        if held is None:
            return  # a last word from an engine that is gone
        if parent is None:
            start = hash(root)
        elif parent in held:
            start = held[parent]
        else:
            return  # its beginning was reported before anyone listened
        # vLLM may have been told a block size; its blocks are what they are.
        size = len(tokens) // len(hashes) if hashes else 0
        if size != self.block_size:
            return
        for name, key in zip(hashes, self._chain(start, tokens, size), strict=True):
            if name not in held:
                held[name] = key
                self._keys[engine][key] += 1

    def removed(self, engine: int, hashes: Sequence[Hashable]) -> None:
        """An engine reports that blocks are gone."""
        held = self._held.get(engine)
        if held is None:
            return
        keys = [held.pop(name) for name in hashes if name in held]
        _subtract(self._keys[engine], keys)

    def cleared(self, engine: int) -> None:
        """An engine reports that its cache is empty."""
        if engine in self._held:
            self._held[engine].clear()
            self._keys[engine].clear()

    def drop(self, engine: int) -> None:
        """The engine is gone."""
        for table in (self._held, self._keys, self._promised):
            table.pop(engine, None)  # type: ignore[attr-defined]

    def blocks(self, engine: int) -> int:
        """How many blocks an engine has reported and not removed."""
        return len(self._held.get(engine, ()))


def _subtract(counter: Counter[Key], keys: Sequence[Key]) -> None:
    for key in keys:
        counter[key] -= 1
        if counter[key] <= 0:
            del counter[key]
