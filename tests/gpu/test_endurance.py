"""The persistent kernel over many operations, stops and restarts, and a tile that hangs."""

from __future__ import annotations

import os
import random
import threading
import time

import operands
import pytest
import torch
from test_apk import random_ids

from vllm_expertplex.moe_server.apk import structs
from vllm_expertplex.moe_server.apk.buffers import OperationTemplate
from vllm_expertplex.moe_server.apk.jit import KernelShape
from vllm_expertplex.moe_server.apk.kernel import KernelHang, PersistentKernel

pytestmark = pytest.mark.gpu
SOAK_OPERATIONS = int(os.environ.get("EXPERTPLEX_SOAK_OPERATIONS", "20000"))
PER_RUN = 2000


@pytest.fixture(scope="module")
def small() -> PersistentKernel:
    return PersistentKernel(KernelShape(hidden=1024, intermediate=384, experts=8, top_k=4))


def make_templates(kernel: PersistentKernel, rng: random.Random) -> list[OperationTemplate]:
    """Six prefill and six decode operations of random sizes."""
    templates = []
    for n in range(12):
        wide = n % 2 == 0
        tokens = rng.randint(1, 1500 if wide else 96)
        op = OperationTemplate(kernel.shape, tokens, wide, kernel.device)
        operands.fill_tokens(
            op, tokens, random_ids(tokens, kernel.shape.top_k, kernel.shape.experts)
        )
        templates.append(op)
    return templates


def test_soak(small: PersistentKernel) -> None:
    """Operations of random shapes and phases, preempting constantly, each result bitwise that of a
    run alone.
    """
    rng = random.Random(os.urandom(8))
    layers = [operands.random_layer(small.shape)]
    budget = structs.Budget(44, 100, 8, 2)
    done, began = 0, time.monotonic()
    while done < SOAK_OPERATIONS:
        templates = make_templates(small, rng)
        alone = []
        for op in templates:
            operands.poison(op)
            small.prepare([op], layers, [(0, structs.PREFILL, op.operation(0, 0))]).run()
            alone.append(op.result.clone())
        arrivals, after, last = [], [], {}
        for n in range(PER_RUN):
            t = rng.randrange(len(templates))
            phase = structs.PREFILL if templates[t].wide else structs.DECODE
            op = templates[t].operation(t, n, x_moe=rng.randint(0, 16))
            op.sources = 1 << t
            arrivals.append((0, phase, op))
            after.append(last.get(t))
            last[t] = n
        run = small.prepare(
            templates,
            layers,
            arrivals,
            budget,
            after=after,
            hold_ns=rng.choice([0, 5_000, 50_000]),
            quantum=rng.choice([1, 4, 64]),
            max_ms=20_000,
        )
        for _ in range(5):
            for op in templates:
                operands.poison(op)
            times = run.run().operations
            assert all(t[2] > t[0] > 0 for t in times), "an operation was not done"
            for op, result in zip(templates, alone, strict=True):
                assert torch.equal(op.result, result)
            done += PER_RUN
    print(f"\n{done} operations in {time.monotonic() - began:.1f} s")


def test_stop_and_restart_100_times(small: PersistentKernel) -> None:
    """A kernel that waits for an operation due in an hour ends within milliseconds of the stop
    word.
    """
    layer = operands.random_layer(small.shape)
    op = OperationTemplate(small.shape, 64, False, small.device)
    operands.fill_tokens(op, 64, random_ids(64, 4, 8))
    arrivals = [
        (0, structs.DECODE, op.operation(0, 0, x_moe=8)),
        (3600 * 10**9, structs.DECODE, op.operation(0, 1, x_moe=8)),
    ]
    run = small.prepare([op], [layer], arrivals, max_ms=4000)
    waits = []
    for n in range(100):
        run.launch()
        time.sleep(0.002)
        began = time.monotonic()
        run.stop(1 + n % 2)
        torch.cuda.synchronize()
        waits.append(time.monotonic() - began)
        run.check()
        first, second = run.operation_times()
        assert first[2] > first[0] > 0
        assert second[2] == 0
    print(
        f"\nstop to exit: median {sorted(waits)[50] * 1e6:.0f} us, "
        f"longest {max(waits) * 1e6:.0f} us"
    )
    assert max(waits) < 0.5


@pytest.mark.parametrize("clusters", [None, 2])
def test_hung_tile_is_named_and_the_launch_ends(
    small: PersistentKernel, clusters: int | None
) -> None:
    """Whichever cluster has it: of two, the one that watches the stop word has it every other
    time.
    """
    kernel = PersistentKernel(small.shape, clusters=clusters)
    layer = operands.random_layer(small.shape)
    op = OperationTemplate(small.shape, 64, False, small.device)
    operands.fill_tokens(op, 64, random_ids(64, 4, 8))
    hang = structs.Operation(sources=1, user=0, layer=0, n_stages=8)
    hang.tiles[structs.HANG] = 1
    for _ in range(8):
        run = kernel.prepare([op], [layer], [(0, structs.DECODE, hang)], tile_ms=20, max_ms=5000)
        run.launch()
        done = threading.Event()

        def wait(done: threading.Event = done) -> None:
            torch.cuda.synchronize()
            done.set()

        threading.Thread(target=wait, daemon=True).start()
        assert done.wait(2.0), "the launch did not end"
        with pytest.raises(KernelHang, match=r"took too long.*hanging tile"):
            run.check()
