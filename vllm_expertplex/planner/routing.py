"""How tokens spread over experts: tiles, active experts and rows of the busiest MoE server.

Owns: expert popularity (a measured histogram or a stated assumption) and what eq. (3) of the
ExpertPlex paper gives under it. Must not know: hardware, times.
"""

import json
import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_expertplex.layout import ExpertMap
from vllm_expertplex.planner.files import read

Array = NDArray[Any]
_TOKENS = np.geomspace(1.0, 2.0**20, 81)  # four points an octave


class MoeLoad(NamedTuple):
    """One MoE operation of one layer on the busiest MoE server.

    `x_moe`: tiles (eq. 3). `active`: experts with at least one row. `rows`: routed rows.
    """

    x_moe: Array
    active: Array
    rows: Array


def lognormal_popularity(experts: int, sigma: float) -> Array:
    """Assumed share of each expert, [experts], summing to one, in a fixed shuffled order."""
    if experts == 1:
        return np.ones(1)
    quantile = (np.arange(experts) + 0.5) / experts
    share = np.exp(sigma * _normal_quantile(quantile))
    np.random.default_rng(0).shuffle(share)
    return share / share.sum()


def read_histogram(path: str, experts: int) -> Array:
    """Measured shares, [experts], from JSON: a list of counts, or one list per layer (summed).

    Raises ValueError when the file has another number of experts.
    """
    text = read("routing histogram", path)
    try:
        counts = np.atleast_2d(np.asarray(json.loads(text), dtype=float)).sum(axis=0)
        good = counts.shape == (experts,) and np.isfinite(counts).all() and counts.min() >= 0
        found = f"{counts.shape[0]} counts"
    except (ValueError, TypeError) as error:  # no JSON, or no array of numbers
        good, found = False, str(error)
    if not good or counts.sum() <= 0:
        raise ValueError(
            f"routing histogram {path}: found {found}, expected {experts} non-negative counts, one "
            "per routed expert (or one such list per layer)"
        )
    return counts / counts.sum()


class Routing:
    """Loads of the busiest MoE server for any number of servers and tokens.

    popularity: share of each expert, [experts]. top_k: experts per token.
    """

    def __init__(self, popularity: Array, top_k: int, source: str) -> None:
        self.popularity = np.asarray(popularity, dtype=float)
        self.experts = len(self.popularity)
        self.top_k = top_k
        self.source = source
        self._tables: dict[tuple[int, int], Array] = {}

    def load(self, servers: Array, tokens: Array, tile: int) -> MoeLoad:
        """Load when `tokens` tokens (arrays broadcast) meet `servers` MoE servers."""
        servers = np.asarray(servers, dtype=np.int64)
        table = self._table(int(servers.max()), tile)
        tokens = np.maximum(np.asarray(tokens, dtype=float), 1.0)
        low = np.minimum((np.log2(tokens) * 4).astype(np.int64), len(_TOKENS) - 2)
        part = (tokens - _TOKENS[low]) / (_TOKENS[low + 1] - _TOKENS[low])
        below, above = table[:, servers, low], table[:, servers, low + 1]
        x_moe, active, rows = below + (above - below) * part
        beyond = tokens > _TOKENS[-1]  # every expert is active and tiles are full
        x_moe = np.where(beyond, rows / tile, x_moe)
        active = np.where(beyond, table[1, servers, -1], active)
        return MoeLoad(x_moe, active, rows)

    def spread(self, servers: Array) -> Array:
        """Expected number of distinct MoE servers one token reaches."""
        servers = np.asarray(servers, dtype=np.int64)
        self._table(int(servers.max()), 1)
        return self._spread[servers]

    def _table(self, most: int, tile: int) -> Array:
        """[3, servers, tokens] of (x_moe, active, rows) of the busiest server."""
        if most > self.experts:
            raise ValueError(
                f"{most} MoE servers for {self.experts} experts: at most one server per expert"
            )
        for (size, known), table in self._tables.items():
            if size >= most and known == tile:
                return table
        hit = np.minimum(1.0, self.top_k * self.popularity)[:, None]  # [experts, 1]
        active = 1.0 - (1.0 - hit) ** _TOKENS[None, :]
        tiles = active + _extra_tiles(hit * _TOKENS[None, :], tile)
        table = np.zeros((3, most + 1, len(_TOKENS)))
        self._spread = np.zeros(most + 1)
        for servers in range(1, most + 1):
            owner = np.asarray(ExpertMap.contiguous(self.experts, servers).server)
            first = np.searchsorted(owner, np.arange(servers))
            table[0, servers] = np.add.reduceat(tiles, first, axis=0).max(axis=0)
            table[1, servers] = np.add.reduceat(active, first, axis=0).max(axis=0)
            table[2, servers] = np.add.reduceat(hit[:, 0], first).max() * _TOKENS
            self._spread[servers] = (
                1.0 - np.prod(1.0 - np.minimum(hit[:, 0], 1.0)[None, :] * _owns(owner, servers), 1)
            ).sum()
        self._tables[most, tile] = table
        return table


def _owns(owner: NDArray[np.int64], servers: int) -> Array:
    """[servers, experts], one where the server holds the expert."""
    return (owner[None, :] == np.arange(servers)[:, None]).astype(float)


def _extra_tiles(mean: Array, tile: int) -> Array:
    """Expected tiles beyond the first of an expert that gets Poisson(`mean`) rows."""
    grid, value = _extra_tiles_table(tile)
    exact = np.interp(mean, grid, value)
    return np.where(mean > grid[-1], mean / tile - 0.5, exact)


@cache
def _extra_tiles_table(tile: int) -> tuple[Array, Array]:
    """E[ceil(m / tile) - (m > 0)] for m ~ Poisson, on a grid of means up to 30 tiles."""
    grid = np.concatenate([[0.0], np.geomspace(0.01, 30.0 * tile, 240)])
    top = int(30 * tile + 10 * math.sqrt(30 * tile)) + 10
    rows = np.arange(top)
    log_factorial = np.cumsum(np.log(np.maximum(rows, 1)))
    extra = np.maximum(np.ceil(rows / tile) - 1, 0)
    value = np.zeros_like(grid)
    for i, mean in enumerate(grid[1:], start=1):
        value[i] = float(np.exp(rows * math.log(mean) - mean - log_factorial) @ extra)
    return grid, value


def _normal_quantile(p: Array) -> Array:
    """Inverse of the standard normal distribution."""
    from statistics import NormalDist

    inverse = NormalDist().inv_cdf
    return np.array([inverse(float(x)) for x in p])
