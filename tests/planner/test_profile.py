"""Profiles: the fit recovers a truth, the file reads back, the kernels answer from it."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_expertplex.planner import profile_cli
from vllm_expertplex.planner.fit import Point, fit
from vllm_expertplex.planner.profile import evaluate, read_profile
from vllm_expertplex.planner.routing import MoeLoad
from vllm_expertplex.planner.setup import setting

TERMS = ("1", "x", "x s", "x s^2")
COEFFICIENT = st.floats(0, 1e-3) | st.just(0.0)


@given(st.tuples(st.floats(1e-6, 1e-3), COEFFICIENT, COEFFICIENT, COEFFICIENT))
@settings(max_examples=50, deadline=None)
def test_the_fit_recovers_exact_times(truth) -> None:
    points = [
        Point(x, s, truth[0] + truth[1] * x + truth[2] * x * s + truth[3] * x * s * s)
        for x in (1, 2, 4, 8)
        for s in (16, 64, 256, 1024)
    ]
    found = fit(points, TERMS)
    assert found.held_out_max_error < 1e-6
    assert min(found.coefficients) >= 0
    assert float(evaluate(found, 3.0, 100.0)) == pytest.approx(
        truth[0] + truth[1] * 3 + truth[2] * 300 + truth[3] * 30_000, rel=1e-5
    )


def test_the_error_is_of_points_the_fit_did_not_see() -> None:
    rng = np.random.default_rng(0)
    points = [Point(x, 1, 1e-3 * x * float(rng.uniform(0.5, 1.5))) for x in range(1, 41)]
    found = fit(points, ("x",))
    assert found.points == 30
    assert found.held_out_points == 10
    assert 0.05 < found.held_out_mean_error < 0.5


def test_too_few_points_are_refused() -> None:
    with pytest.raises(ValueError, match="measure at least"):
        fit([Point(1, 1, 1.0), Point(2, 1, 1.0)], TERMS)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A tiny model's config and its profile, really measured."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(
        '{"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128,'
        '"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,'
        '"num_local_experts": 8, "num_experts_per_tok": 2}'
    )
    parser = argparse.ArgumentParser()
    profile_cli.add_arguments(parser)
    path = str(folder / "profile.json")
    words = [str(folder), "-o", path, "--most-tokens", "256", "--threads", "1"]
    assert profile_cli.run(parser.parse_args(words)) == 0
    return str(folder), path


def test_a_measured_profile_reads_back(tiny) -> None:
    profile = read_profile(tiny[1])
    assert profile.measured
    assert profile.hidden == 64
    for part in (
        profile.prefill_attention,
        profile.decode_attention,
        *(m.fit for m in profile.moe),
    ):
        assert sum(part.coefficients) > 0
        assert part.held_out_points > 0


def test_the_planner_plans_on_a_measured_profile(tiny) -> None:
    folder, path = tiny
    given_ = setting(folder, "h200", "64/16", 5, 1, profile=path)
    assert given_.kernels.source.startswith("measured")
    assert given_.assumptions.masked_tile == read_profile(path).decode_tile
    load = MoeLoad(np.array([4.0, 40.0]), np.array([4.0, 8.0]), np.array([8.0, 600.0]))
    times = given_.kernels.routed_experts("decode", load, 1.0)
    assert times[1] >= times[0] > 0
    half = given_.kernels.routed_experts("decode", load, 0.5)
    assert (half >= times).all()


def test_a_profile_of_another_model_is_refused(tiny) -> None:
    with pytest.raises(ValueError, match="profile this model"):
        setting("minimax-m2.7", "h200", "64/16", 5, 1, profile=tiny[1])


def test_a_large_model_is_not_measured_on_a_cpu(capsys) -> None:
    parser = argparse.ArgumentParser()
    profile_cli.add_arguments(parser)
    assert profile_cli.run(parser.parse_args(["minimax-m2.7"])) == 2
    assert "profile a small model here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--threads", "0"], "--threads 0"),
        (["--threads", "-1"], "--threads -1"),
        (["--tile", "0"], "--tile 0"),
        (["--tile", "-4"], "--tile -4"),
        (["--most-tokens", "0"], "--most-tokens 0"),
        (["--most-tokens", "40"], "--most-tokens 40"),
        (["-o", "/none/profile.json"], "--output"),
        (["--device", "cuda"], "GPU"),
    ],
)
def test_what_cannot_be_measured_is_said_at_once(
    words, expected, tiny, capsys, monkeypatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    parser = argparse.ArgumentParser()
    profile_cli.add_arguments(parser)
    assert profile_cli.run(parser.parse_args([tiny[0], *words])) == 2
    shown = capsys.readouterr()
    assert expected in shown.err
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize(
    "change",
    [
        {"moe": []}, {"sms": 0}, {"prefill_tile": 0}, {"version": 2},
        {"prefill_attention": {"terms": ["y"], "coefficients": [1.0], "points": 9,
         "held_out_points": 3, "held_out_mean_error": 0.1, "held_out_max_error": 0.1}},
        {"decode_attention": {"terms": ["1", "x"], "coefficients": [1.0], "points": 9,
         "held_out_points": 3, "held_out_mean_error": 0.1, "held_out_max_error": 0.1}},
    ],
)  # fmt: skip
def test_a_profile_that_cannot_be_is_refused(change, tiny, tmp_path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(json.loads(Path(tiny[1]).read_text()) | change))
    with pytest.raises(ValueError, match=str(path)):
        read_profile(str(path))
