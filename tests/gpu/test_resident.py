"""The resident kernel serving slots: against float64, against finite runs bit for bit, and through
what may go wrong.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import operands
import pytest
import torch
from client import Clients, Source, expect, pack, resident
from test_apk import BF16_LAYER_ERROR, FP8_LAYER_ERROR, random_ids

from vllm_expertplex.comm.peer import SlotLayout
from vllm_expertplex.layout import Server, SlotOwner
from vllm_expertplex.moe_server.apk import structs
from vllm_expertplex.moe_server.apk.buffers import OperationTemplate
from vllm_expertplex.moe_server.apk.jit import KernelShape
from vllm_expertplex.moe_server.apk.kernel import PersistentKernel
from vllm_expertplex.moe_server.apk.report import KernelHang
from vllm_expertplex.moe_server.apk.resident import ResidentRun
from vllm_expertplex.moe_server.slots import Slots

pytestmark = pytest.mark.gpu
SOAK_OPERATIONS = int(os.environ.get("EXPERTPLEX_SOAK_OPERATIONS", "20000"))
MAX_MS = 30_000


def make_kernel(bf16: bool) -> PersistentKernel:
    shape = KernelShape(hidden=1024, intermediate=384, experts=8, top_k=4, bf16=bf16)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    return PersistentKernel(shape, clusters=sms // 2 - 1)  # two SMs for the clients


@pytest.fixture(scope="module")
def small() -> PersistentKernel:
    return make_kernel(False)


@pytest.fixture(scope="module")
def bf16() -> PersistentKernel:
    return make_kernel(True)


@pytest.fixture(scope="module")
def clients() -> Clients:
    made = Clients()
    made.warm_up()
    return made


@pytest.mark.parametrize("kind", ["small", "bf16"])
def test_served_operations_match_float64(request: pytest.FixtureRequest, kind: str) -> None:
    kernel: PersistentKernel = request.getfixturevalue(kind)
    layers = [operands.random_layer(kernel.shape) for _ in range(2)]
    given = []
    for tokens, phase, layer in ((1, 0, 0), (64, 0, 1), (7, 1, 0), (1000, 1, 1), (1000, 0, 0)):
        op = OperationTemplate(kernel.shape, 1000, True, kernel.device)
        ids = random_ids(1000, kernel.shape.top_k, kernel.shape.experts)
        ids[0, 0] = 3
        operands.fill_tokens(op, 1000, ids)
        want = operands.moe64(op, layers[layer], tokens).cpu()
        given.append((op, tokens, phase, layer, want))
    sources = [Source(kernel.shape, 1000, i) for i in range(len(given))]
    for source, (op, *_) in zip(sources, given, strict=True):
        source.put(pack(op, source.layout))
    bound = BF16_LAYER_ERROR if kernel.shape.bf16 else FP8_LAYER_ERROR
    run = ResidentRun(kernel, [s.served for s in sources], layers, max_ms=MAX_MS)
    with resident(run):
        for source, (_, tokens, phase, layer, want) in zip(sources, given, strict=True):
            source.send(phase, layer, tokens)
            source.wait()
            assert operands.error(source.result(tokens), want) < bound


def test_soak_of_several_sources(small: PersistentKernel, clients: Clients) -> None:
    """Operations of random sizes, phases and layers from seven sources at once, each bit for bit
    what a finite run makes of it, over two launches.
    """
    layers = [operands.random_layer(small.shape) for _ in range(3)]
    expected = expect(small, layers, 768, 3)
    sources = [Source(small.shape, 768, i) for i in range(7)]
    most = [(64, 0), (64, 0), (16, 0), (1, 0), (0, 768), (0, 300), (96, 700)]
    share = SOAK_OPERATIONS // 12
    run = ResidentRun(
        small,
        [s.served for s in sources],
        layers,
        structs.Budget(44, 100, 8, 2),
        hold_ns=5_000,
        quantum=4,
        operation_ms=2000,
        max_ms=MAX_MS,
    )
    for seed in (1, 2):
        counts = [share if decode else share // 3 for decode, _ in most]
        clients.prepare(sources, most, expected, counts, seed=seed)
        began = time.monotonic()
        with resident(run):
            outcomes = clients.run()
            took = time.monotonic() - began
        assert outcomes == [(n, 0, 0) for n in counts]
        did = run.tallies()
        assert min(did.tiles_decode, did.tiles_prefill, did.preemptions, did.weight_bytes) > 0
        assert did.operations_decode + did.operations_prefill == sum(counts)
        assert 0 < did.coalesced < did.operations_decode
        print(f"\n{sum(counts)} operations in {took:.1f} s; {did}")


def test_servers_in_step_run_as_one(small: PersistentKernel, clients: Clients) -> None:
    """Also where the buffers have no room for all of them at once."""
    layers = [operands.random_layer(small.shape)]
    expected = expect(small, layers, 64, 2)
    sources = [Source(small.shape, 64, i) for i in range(5)]
    run = ResidentRun(small, [s.served for s in sources], layers, window_ns=200_000, max_ms=MAX_MS)
    for most in (12, 64):
        clients.prepare(sources, [(most, 0)] * 5, expected, [500] * 5)
        with resident(run):
            assert clients.run() == [(500, 0, 0)] * 5
        did = run.tallies()
        assert did.operations_decode == 2500
        if most == 12:  # five fit, and most of them find each other
            assert did.coalesced > 500
    print(f"\n{did}")


@pytest.mark.parametrize("fifo", [True, False])
def test_decode_waits_its_turn_with_fifo_only(small: PersistentKernel, fifo: bool) -> None:
    layers = [operands.random_layer(small.shape)]
    op = OperationTemplate(small.shape, 20_000, True, small.device)
    operands.fill_tokens(op, 20_000, random_ids(20_000, 4, 8))
    before = [Source(small.shape, 20_000, i) for i in range(3)]
    decode = Source(small.shape, 64, 3)
    for source in (*before, decode):
        source.put(pack(op, source.layout))
    served = [s.served for s in (*before, decode)]
    run = ResidentRun(small, served, layers, fifo=fifo, max_ms=MAX_MS)
    with resident(run):
        for source in before:  # most of a millisecond of work
            source.send(structs.PREFILL, 0, 20_000)
        decode.send(structs.DECODE, 0, 64)
        decode.wait()
        waited = all(int(s.done.cpu()) == s.seq for s in before)
        for source in before:
            source.wait()
    assert waited == fifo
    wanted = before[0].result(20_000)
    for source in before[1:]:
        assert torch.equal(source.result(20_000), wanted)


@pytest.mark.parametrize("fifo", [True, False])
def test_neither_fifo_nor_separate_operations_change_a_result(
    small: PersistentKernel, clients: Clients, fifo: bool
) -> None:
    layers = [operands.random_layer(small.shape) for _ in range(2)]
    expected = expect(small, layers, 300, 2)
    sources = [Source(small.shape, 300, i) for i in range(5)]
    most, counts = [(64, 0), (64, 0), (1, 0), (0, 300), (96, 300)], [400] * 5
    clients.prepare(sources, most, expected, counts)
    served = [s.served for s in sources]
    run = ResidentRun(small, served, layers, fifo=fifo, coalescing=False, max_ms=MAX_MS)
    with resident(run):
        assert clients.run() == [(n, 0, 0) for n in counts]
    did = run.tallies()
    assert did.operations_decode + did.operations_prefill == sum(counts)
    assert did.coalesced == 0


def test_long_tiles_that_decode_interrupts_all_the_time(clients: Clients) -> None:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    kernel = PersistentKernel(KernelShape(2048, 2048, 8, 4), clusters=sms // 2 - 1)
    layers = [operands.random_layer(kernel.shape) for _ in range(2)]
    expected = expect(kernel, layers, 3000, 1)
    sources = [Source(kernel.shape, 3000, i) for i in range(4)]
    most, counts = [(0, 3000), (0, 3000), (16, 0), (64, 0)], [60, 60, 1500, 1500]
    clients.prepare(sources, most, expected, counts, gap_ns=30_000)
    run = ResidentRun(kernel, [s.served for s in sources], layers, max_ms=MAX_MS)
    with resident(run):
        assert clients.run() == [(n, 0, 0) for n in counts]


def test_stop_and_restart(small: PersistentKernel, clients: Clients) -> None:
    """Sequence numbers go on across launches, and nothing is served twice or lost."""
    layers = [operands.random_layer(small.shape)]
    expected = expect(small, layers, 64, 1)
    source = Source(small.shape, 64, 3)
    run = ResidentRun(small, [source.served], layers, max_ms=4000)
    for n in range(30):
        clients.prepare([source], [(64, 64)], expected, [20], seed=n + 1)
        with resident(run):
            assert clients.run() == [(20, 0, 0)]
    assert source.seq == 600


def test_a_word_that_cannot_be_served_costs_only_its_source(small: PersistentKernel) -> None:
    layers = [operands.random_layer(small.shape)]
    sources = [Source(small.shape, 64, i) for i in range(2)]
    op = OperationTemplate(small.shape, 64, False, small.device)
    operands.fill_tokens(op, 64, random_ids(64, 4, 8))
    for source in sources:
        source.put(pack(op, source.layout))
    run = ResidentRun(small, [s.served for s in sources], layers, max_ms=4000)
    with resident(run):
        for phase, layer, tokens in ((0, 1, 8), (1, 0, 65)):
            sources[0].send(phase, layer, tokens)
            sources[1].send(0, 0, 64)
            sources[1].wait()
            time.sleep(0.01)
            warning = run.check()
            assert warning is not None
            assert f"layer {layer}, slot 0, {tokens} tokens" in warning
        sources[0].send(1, 0, 0)  # no tokens: done at once
        sources[0].wait()
        sources[0].send(1, 0, 64)
        sources[0].wait()
        assert torch.equal(sources[0].result(64), sources[1].result(64))


def hung(run: ResidentRun) -> str:
    deadline = time.monotonic() + 3
    while run.running:
        assert time.monotonic() < deadline, "the launch did not end"
        time.sleep(0.001)
    with pytest.raises(KernelHang) as raised:
        run.wait()
    return str(raised.value)


def test_an_overdue_operation_and_a_slow_tile_are_named(small: PersistentKernel) -> None:
    layers = [operands.random_layer(small.shape) for _ in range(2)]
    op = OperationTemplate(small.shape, 20_000, True, small.device)
    operands.fill_tokens(op, 20_000, random_ids(20_000, 4, 8))
    for limit, named in (
        ("operation_ns", r"overdue: phase prefill, layer 1, slot 0, .* unfinished"),
        ("tile_ns", r"tile took too long: cluster \d+, phase prefill, layer 1"),
    ):
        source = Source(small.shape, 20_000, 0)
        source.put(pack(op, source.layout))
        run = ResidentRun(small, [source.served], layers, operation_ms=1000, max_ms=4000)
        setattr(run.arguments, limit, 1000)  # a microsecond, which nothing keeps to
        run.launch()
        until = time.monotonic() + 3
        while run.running and time.monotonic() < until:  # a check may fall between two operations
            source.send(structs.PREFILL, 1, 20_000)
            while run.running and int(source.done.cpu()) != source.seq:
                pass
        message = hung(run)
        assert re.search(named, message), message


def test_a_killed_attention_server_costs_nobody_else(
    small: PersistentKernel, clients: Clients, tmp_path: Path
) -> None:
    """The other process maps its slot and exports its done word; it dies with work in flight."""
    layers = [operands.random_layer(small.shape)]
    layout = SlotLayout(512, small.shape.hidden, small.shape.top_k, True)
    owner = SlotOwner(Server("prefill", 0))
    slots = Slots(tmp_path, Server("moe", 0), [owner], [layout], small.shape, small.device)
    expected = expect(small, layers, 64, 1)
    mine = Source(small.shape, 64, 1)
    script = Path(__file__).with_name("remote_source.py")
    child = subprocess.Popen([sys.executable, str(script), str(tmp_path)], stdout=subprocess.PIPE)
    try:
        remote = slots.connect(60.0)
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        clients.prepare([mine], [(64, 64)], expected, [2000])
        run = ResidentRun(small, [*remote, mine.served], layers, max_ms=MAX_MS)
        with resident(run):
            assert child.stdout.readline() == b"served\n"  # a hundred operations
            child.send_signal(signal.SIGKILL)
            child.wait()
            assert clients.run() == [(2000, 0, 0)]
            assert run.check() is None
            assert run.running
    finally:
        child.kill()
