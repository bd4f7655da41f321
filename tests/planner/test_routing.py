"""Tiles, active experts and spread against drawn routings."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_expertplex.planner.routing import Routing, lognormal_popularity, read_histogram


def drawn(popularity, top_k, servers, tokens, tile, draws=200):
    """(mean over draws of the busiest server's tiles, active experts), independent choices."""
    rng = np.random.default_rng(1)
    experts = len(popularity)
    owner = np.sort(np.arange(experts) % servers)
    hit = np.minimum(1.0, top_k * popularity)
    rows = rng.binomial(tokens, hit, size=(draws, experts))
    tiles = np.ceil(rows / tile)
    per_server = np.stack([tiles[:, owner == s].sum(axis=1) for s in range(servers)], axis=1)
    active = np.stack([(rows[:, owner == s] > 0).sum(axis=1) for s in range(servers)], axis=1)
    return per_server.mean(axis=0).max(), active.mean(axis=0).max()


@pytest.mark.parametrize("tokens", [1, 7, 64, 500, 4000])
@pytest.mark.parametrize("servers", [1, 4, 8])
def test_tiles_match_drawn_routings(servers: int, tokens: int) -> None:
    popularity = lognormal_popularity(64, 0.35)
    routing = Routing(popularity, 8, "")
    load = routing.load(np.array([servers]), np.array([float(tokens)]), 64)
    tiles, active = drawn(popularity, 8, servers, tokens, 64)
    assert load.x_moe[0] == pytest.approx(tiles, rel=0.06)
    assert load.active[0] == pytest.approx(active, rel=0.06)


@given(
    tokens=st.integers(1, 100_000), servers=st.integers(1, 60), tile=st.sampled_from([16, 64, 128])
)
@settings(max_examples=60, deadline=None)
def test_loads_keep_their_bounds(tokens: int, servers: int, tile: int) -> None:
    routing = Routing(lognormal_popularity(60, 0.5), 4, "")
    load = routing.load(np.array([servers]), np.array([float(tokens)]), tile)
    x_moe, active, rows = (float(v[0]) for v in load)
    assert 0 < active <= -(-60 // servers) + 1e-9
    assert x_moe >= active - 1e-9
    assert rows <= tokens * 4 + 1e-6
    assert rows >= tokens * 4 / servers - 1e-6  # the busiest has at least the mean
    assert x_moe <= rows / tile + active + 1e-6


@given(st.integers(1, 5000), st.integers(1, 59))
@settings(max_examples=60, deadline=None)
def test_more_tokens_or_fewer_servers_never_mean_less_work(tokens: int, servers: int) -> None:
    routing = Routing(lognormal_popularity(60, 0.0), 4, "")
    count = np.array([servers, servers, servers + 1])
    load = routing.load(count, np.array([tokens, tokens + 1.0, tokens]), 64)
    assert load.x_moe[1] >= load.x_moe[0] - 1e-9
    assert load.x_moe[2] <= load.x_moe[0] + 1e-9


def test_spread_is_between_one_server_and_top_k() -> None:
    routing = Routing(lognormal_popularity(256, 0.35), 8, "")
    spread = routing.spread(np.array([1, 4, 256]))
    assert spread[0] == pytest.approx(1.0, abs=0.01)
    assert spread[1] < 4
    assert spread[2] == pytest.approx(8.0, rel=0.01)


def test_more_servers_than_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="at most one server per expert"):
        Routing(lognormal_popularity(8, 0.3), 2, "").load(np.array([9]), np.array([1.0]), 64)


def test_histogram_of_layers_is_summed(tmp_path) -> None:
    path = tmp_path / "h.json"
    path.write_text("[[1, 0, 3, 0], [1, 2, 1, 0]]")
    assert read_histogram(str(path), 4).tolist() == [0.25, 0.25, 0.5, 0.0]
    with pytest.raises(ValueError, match="found 4 counts, expected 8"):
        read_histogram(str(path), 8)
