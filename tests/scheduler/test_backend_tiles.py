"""The CPU backend: right rows, whatever runs beside them, and failures that are told."""

import json
import re
import time

import pytest
import torch
from experts import (
    TIMEOUT_S,
    Pending,
    Shape,
    clone,
    dequantised,
    make_layer,
    make_operation,
    reference,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_expertplex.layout import PHASE_DECODE, PHASE_PREFILL
from vllm_expertplex.moe_server import backend_tiles
from vllm_expertplex.moe_server.backend_tiles import TileOptions, TilesBackend

SHAPE = Shape(experts=6, hidden=160, intermediate=96, topk=3)
# Relative error of a whole result: the activation is rounded once to the model's dtype.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3}
DTYPES = list(TOLERANCE)


@pytest.fixture
def backend():
    """Makes backends, and closes them."""
    made = []

    def make(layers, **options):
        made.append(TilesBackend([clone(layer) for layer in layers], TileOptions(**options)))
        return made[-1]

    yield make
    for b in made:
        b.close()


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error of the rows made here; infinite if others were written."""
    made = ~expected.isnan()
    if not torch.equal(made, ~found.isnan()):
        return float("inf")
    found, expected = found[made], expected[made]
    return float((found.double() - expected).norm() / expected.norm().clamp_min(1e-30))


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit for bit; what was not written is NaN in both."""
    return torch.equal(left.view(torch.int32), right.view(torch.int32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("phase", [PHASE_DECODE, PHASE_PREFILL])
def test_equals_float64_within_rounding(backend, dtype, phase):
    layer = make_layer(SHAPE, dtype)
    tiles = backend([layer], workers=2)
    for tokens in (1, 2, 31, 33, 129, 300):  # 300 takes the stages that count rows
        pending = Pending(make_operation(SHAPE, tokens, dtype, phase=phase, seed=tokens))
        tiles.submit([pending.op])
        assert error(pending.result(), reference(layer, pending.op)) < TOLERANCE[dtype]


@pytest.mark.parametrize("phase", [PHASE_DECODE, PHASE_PREFILL])
def test_fp8_equals_its_dequantised_checkpoint_bit_for_bit(backend, phase):
    layer = make_layer(SHAPE, torch.float8_e4m3fn)
    wide = dequantised(layer)
    fp8, bf16 = backend([layer], workers=2), backend([wide], workers=1)
    for tokens in (1, 40, 300):
        op = make_operation(SHAPE, tokens, torch.bfloat16, phase=phase, seed=tokens)
        left, right = Pending(op), Pending(op)
        fp8.submit([left.op])
        bf16.submit([right.op])
        assert same(left.result(), right.result())
        assert error(left.result(), reference(wide, op)) < TOLERANCE[torch.bfloat16]


def test_zero_tokens_and_no_local_expert_complete(backend):
    layer = make_layer(SHAPE, torch.bfloat16)
    tiles = backend([layer])
    for tokens, phase in (
        (0, PHASE_DECODE),
        (0, PHASE_PREFILL),
        (5, PHASE_DECODE),
        (400, PHASE_PREFILL),
    ):
        pending = Pending(make_operation(SHAPE, tokens, torch.bfloat16, phase=phase, absent=1.0))
        tiles.submit([pending.op])
        assert pending.result().isnan().all()  # nothing to write
        assert pending.completions == 1


def test_all_tokens_on_one_expert(backend):
    layer = make_layer(SHAPE, torch.float32)
    tiles = backend([layer], workers=2)
    for phase in (PHASE_DECODE, PHASE_PREFILL):
        op = make_operation(SHAPE, 300, torch.float32, phase=phase)
        op.topk_ids.fill_(-1)[:, 1] = 4
        pending = Pending(op)
        tiles.submit([pending.op])
        assert error(pending.result(), reference(layer, op)) < TOLERANCE[torch.float32]


def drawn_operation(data, source, *, tokens, layers, **more):
    """Of either phase, of at most so many tokens, and of one of so many layers."""
    return make_operation(
        SHAPE,
        data.draw(st.integers(0, tokens), label="tokens"),
        torch.bfloat16,
        phase=data.draw(st.sampled_from([PHASE_DECODE, PHASE_PREFILL]), label="phase"),
        source=source,
        layer=data.draw(st.integers(0, layers - 1), label="layer"),
        seed=source,
        **more,
    )


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_results_do_not_depend_on_what_runs_beside_them(data):
    """Random operations of both phases at once, against each alone: bit for bit."""
    layers = [make_layer(SHAPE, torch.bfloat16, seed) for seed in range(3)]
    operations = [
        drawn_operation(data, source, tokens=60, layers=len(layers))
        for source in range(data.draw(st.integers(1, 8), label="sources"))
    ]
    options = TileOptions(
        workers=data.draw(st.integers(1, 3), label="workers"),
        quantum=data.draw(st.integers(1, 3), label="quantum"),
        hold_us=data.draw(st.sampled_from([0, 50]), label="hold"),
        coalescing=data.draw(st.booleans(), label="coalescing"),
        window_us=data.draw(st.sampled_from([0, 300]), label="window"),
    )
    together = TilesBackend([clone(layer) for layer in layers], options)
    alone = TilesBackend([clone(layer) for layer in layers], TileOptions(workers=1))
    try:
        beside = [Pending(op) for op in operations]
        together.submit([p.op for p in beside])
        for op, pending in zip(operations, beside, strict=True):
            single = Pending(op)
            alone.submit([single.op])
            assert same(pending.result(), single.result())
            assert pending.completions == 1
    finally:
        together.close()
        alone.close()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_fifo_serves_in_order_of_arrival_and_loses_nothing(data):
    """No decode operation overtakes a prefill operation, or another, however they arrive."""
    layers = [make_layer(SHAPE, torch.bfloat16, seed) for seed in range(2)]
    order: list[int] = []
    line = [
        Pending(
            drawn_operation(data, n, tokens=80, layers=len(layers), absent=0.0),
            lambda n=n: order.append(n),
        )
        for n in range(data.draw(st.integers(2, 12), label="operations"))
    ]
    workers = data.draw(st.integers(1, 3), label="workers")
    together = data.draw(st.integers(1, 12), label="that become ready together")
    fifo = TilesBackend([clone(x) for x in layers], TileOptions(workers=workers, fifo=True))
    alone = TilesBackend([clone(x) for x in layers], TileOptions(workers=1))
    try:
        for first in range(0, len(line), together):
            fifo.submit([p.op for p in line[first : first + together]])
        for pending in line:
            single = Pending(pending.op)
            alone.submit([single.op])
            assert same(pending.result(), single.result())
        assert order == list(range(len(line)))
        assert fifo.stats()["coalesced"] == 0
    finally:
        fifo.close()
        alone.close()


@pytest.mark.parametrize("coalescing", [True, False])
def test_decode_servers_in_step_read_weights_once_if_coalesced(backend, coalescing):
    shape = Shape(experts=4, hidden=64, intermediate=64, topk=4)  # every token on every expert
    layer = make_layer(shape, torch.bfloat16)
    tiles = backend([layer], workers=2, coalescing=coalescing)
    pair = [Pending(make_operation(shape, 4, torch.bfloat16, source=s, absent=0.0)) for s in (0, 1)]
    tiles.submit([p.op for p in pair])
    for pending in pair:
        assert error(pending.result(), reference(layer, pending.op)) < TOLERANCE[torch.bfloat16]
    stats = tiles.stats()
    assert stats["coalesced"] == int(coalescing)
    read = sum(w["weight_bytes"][PHASE_DECODE] for w in stats["workers"])
    assert read == layer.bytes * (1 if coalescing else 2)


def test_counts_what_was_done(backend):
    layer = make_layer(SHAPE, torch.bfloat16)
    tiles = backend([layer], workers=2)
    for phase in (PHASE_PREFILL, PHASE_DECODE):
        pending = Pending(make_operation(SHAPE, 20, torch.bfloat16, phase=phase))
        tiles.submit([pending.op])
        pending.result()
    stats = tiles.stats()
    assert stats["submitted"] == stats["done"] == (1, 1)
    for phase in (PHASE_DECODE, PHASE_PREFILL):
        assert sum(w["tiles"][phase] for w in stats["workers"]) > 0


def test_trace_has_one_track_per_worker(backend, tmp_path):
    path = tmp_path / "trace.json"
    tiles = backend([make_layer(SHAPE, torch.bfloat16)], workers=2, trace=str(path))
    pending = Pending(make_operation(SHAPE, 200, torch.bfloat16, phase=PHASE_PREFILL))
    tiles.submit([pending.op])
    pending.result()
    tiles.close()
    events = json.loads(path.read_text())["traceEvents"]
    assert {e["tid"] for e in events if e["ph"] == "M"} == {0, 1}
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["name"] for e in spans} == {"prefill"}
    assert {"scatter", "gate_up", "down"} <= {e["args"]["stage"] for e in spans}
    assert all(e["dur"] >= 0 for e in spans)


def test_more_workers_than_the_scheduler_has_room_for_are_not_started(
    backend, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(backend_tiles, "MAX_WORKERS", 2)
    tiles = backend([make_layer(SHAPE, torch.float32)], workers=3)
    assert len(tiles.stats()["workers"]) == 2


def test_expert_that_does_not_exist_is_an_error_of_the_server(backend):
    tiles = backend([make_layer(SHAPE, torch.bfloat16)])
    op = make_operation(SHAPE, 2, torch.bfloat16)
    op.topk_ids[0, 0] = SHAPE.experts
    with pytest.raises(RuntimeError, match="expert slot 6"):
        tiles.submit([Pending(op).op])


def test_third_operation_in_flight_is_refused(backend):
    shape = Shape(experts=2, hidden=1024, intermediate=512, topk=2)
    tiles = backend([make_layer(shape, torch.float32)], workers=1)
    ops = [Pending(make_operation(shape, 200, torch.float32, phase=PHASE_PREFILL)) for _ in "123"]
    with pytest.raises(RuntimeError, match="source 0 has more than 2 operations"):
        tiles.submit([p.op for p in ops])


def test_deadline_names_what_it_waited_for(backend):
    shape = Shape(experts=2, hidden=1024, intermediate=1024, topk=2)
    tiles = backend([make_layer(shape, torch.float32)], workers=1, deadline_s=1e-6)
    pending = Pending(make_operation(shape, 2000, torch.float32, phase=PHASE_PREFILL, source=3))
    tiles.submit([pending.op])
    assert re.search(r"prefill operation of layer 0, source 3, .* stage ", first_failure(tiles))


def first_failure(tiles: TilesBackend) -> str:
    for _ in range(int(TIMEOUT_S * 100)):
        try:
            tiles.check()
        except RuntimeError as failure:
            return str(failure)
        time.sleep(0.01)
    raise AssertionError("no failure was told")


def test_close_does_not_wait_for_operations(backend):
    shape = Shape(experts=2, hidden=1024, intermediate=1024, topk=2)
    tiles = backend([make_layer(shape, torch.float32)], workers=1)
    pending = Pending(make_operation(shape, 4000, torch.float32, phase=PHASE_PREFILL))
    tiles.submit([pending.op])
    tiles.close()
    assert pending.completions == 0


@pytest.mark.parametrize(
    ("shape", "match"), [(Shape(hidden=48), "48"), (Shape(intermediate=40), "40")]
)
def test_refuses_shapes_that_are_not_whole_panels(shape, match):
    with pytest.raises(ValueError, match=match):
        TilesBackend([make_layer(shape, torch.bfloat16)])
