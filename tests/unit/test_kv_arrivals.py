"""How long a request waits for a decode server that fetches its KV, and how it ends."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from decode_engine import BLOCKS, DecodeEngine, engine_config
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config import VllmConfig

from vllm_expertplex.executor.scheduler import AsyncDecodeScheduler, DecodeScheduler

Configs = dict[bool, VllmConfig]


@pytest.fixture(scope="module")
def configs(tiny: Callable[[str], Path]) -> Configs:
    """By whether steps are planned while others run."""
    model = tiny("qwen3-moe")
    return {asynchronous: engine_config(model, asynchronous) for asynchronous in (False, True)}


def engine_of(configs: Configs, asynchronous: bool, in_process: bool = True) -> DecodeEngine:
    scheduler = AsyncDecodeScheduler if asynchronous else DecodeScheduler
    return DecodeEngine(configs[asynchronous], scheduler, in_process)


def wait_of_newcomer(engine: DecodeEngine, phase: float, read: float) -> float:
    """Steps from the arrival of a request, `phase` after a step has begun, to its first token."""
    engine.add("busy", range(20), 80)
    for _ in range(6):
        engine.turn()
    arrival = math.floor(engine.device.now) + 1 + phase
    while engine.device.now < arrival:
        engine.turn()
    engine.add("new", range(100, 140), 8, read)
    while not engine.tokens["new"]:
        assert engine.device.now < arrival + 20, "it never began"
        engine.turn()
    return engine.tokens["new"][0] - arrival


@pytest.mark.parametrize("asynchronous", [False, True])
@settings(max_examples=20, deadline=None)
@given(phase=st.floats(0.05, 0.95), read=st.floats(0, 3))
def test_fetched_kv_is_used_by_the_next_step_that_is_planned(
    configs: Configs, asynchronous: bool, phase: float, read: float
) -> None:
    engine = engine_of(configs, asynchronous)
    wait = wait_of_newcomer(engine, phase, read)
    # Until the loop turns, whole steps while it reads, its own step; and the step before, if that
    # was launched already.
    assert wait <= (1 - phase) + max(math.ceil(read), 1) + 1 + asynchronous + 1e-6


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "turns": draw(st.integers(0, 4)),  # of the loop, before it arrives
        "prefix": draw(st.integers(0, 1)),  # prompts of one kind share their blocks
        "prompt": draw(st.sampled_from([1, 15, 16, 17, 32, 60])),
        "max_tokens": draw(st.integers(2, 100)),
        "read": draw(st.none() | st.floats(0, 5)),
        "fails": draw(st.booleans()),
        "abort_after": draw(st.none() | st.integers(0, 12)),  # turns, from its arrival
    }


@settings(max_examples=100, deadline=None)
@given(
    asynchronous=st.booleans(),
    in_process=st.booleans(),
    tells=st.sampled_from([(True, True), (True, False), (False, True)]),
    plan=st.lists(requests(), min_size=1, max_size=8),
)
def test_every_request_ends_as_it_should_and_returns_its_blocks(
    configs: Configs,
    asynchronous: bool,
    in_process: bool,
    tells: tuple[bool, bool],
    plan: list[dict[str, Any]],
) -> None:
    engine = engine_of(configs, asynchronous, in_process)
    reads = engine.device.reads
    reads.names_failed, reads.names_blocks = tells
    free = BLOCKS - 1
    assert engine.free_blocks == free
    aborts: dict[int, list[str]] = {}
    turn = 0
    arrivals: dict[int, list[str]] = {}
    for number, request in enumerate(plan):
        turn += request["turns"]
        arrivals.setdefault(turn, []).append(str(number))
        if request["abort_after"] is not None:
            aborts.setdefault(turn + request["abort_after"], []).append(str(number))
    aborted: set[str] = set()
    for now in range(2000):
        for name in arrivals.pop(now, ()):
            request = plan[int(name)]
            if request["fails"]:
                reads.fails.add(name)
            first = 1000 * request["prefix"]
            prompt = range(first, first + request["prompt"])
            engine.add(name, prompt, request["max_tokens"], request["read"])
        gone = [name for name in aborts.pop(now, ()) if name not in engine.ended]
        engine.abort_requests(gone)
        aborted.update(gone)
        if engine.busy:
            engine.turn()
        elif not arrivals:
            break
    assert not engine.busy
    assert not arrivals
    assert engine.free_blocks == free
    for number, request in enumerate(plan):
        name = str(number)
        fetched = name in reads.posted
        if fetched and name in engine.device.ran:
            assert name in reads.done
            assert engine.device.ran[name] >= reads.posted[name] + request["read"]
        if name in aborted:
            continue
        if fetched and request["fails"]:
            assert (engine.ended[name], engine.tokens[name]) == ("error", [])
        else:
            # Of what was prefilled elsewhere, the first token is there already.
            made = request["max_tokens"] - (request["read"] is not None)
            assert (engine.ended[name], len(engine.tokens[name])) == ("length", made)
