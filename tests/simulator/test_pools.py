"""KV accounting: no rank ever holds more than it has, nothing leaks."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_expertplex.simulator.pools import DecodePool, PrefillQueue
from vllm_expertplex.simulator.requests import Requests


@given(
    lengths=st.lists(st.tuples(st.integers(1, 50), st.integers(2, 20)), min_size=1, max_size=40),
    ranks=st.integers(1, 4),
    capacity=st.integers(70, 200),
    slots=st.integers(1, 5),
    kill=st.integers(0, 30),
)
@settings(max_examples=200, deadline=None)
def test_kv_is_never_oversubscribed_and_always_returned(
    lengths, ranks, capacity, slots, kill
) -> None:
    inputs, outputs = (np.array(v) for v in zip(*lengths, strict=True))
    requests = Requests(np.zeros(len(inputs)), inputs, outputs)
    pool = DecodePool(requests, ranks, float(capacity), slots)
    waiting, finished, step = list(range(len(inputs))), 0, 0
    while finished < len(inputs):
        step += 1
        while waiting and (rank := pool.place(waiting[0])) is not None:
            pool.reserve(waiting[0], rank)
            pool.start(waiting.pop(0))
        assert (pool.reserved <= capacity).all()
        assert (pool.context <= pool.reserved).all()
        assert (pool.count <= slots).all()
        finished += len(pool.advance(float(step)))
        if step == kill and pool.alive.sum() > 1:
            waiting = pool.lose_rank(int(np.argmax(pool.alive))) + waiting
        assert step < 10_000
    assert pool.running == 0
    assert pool.reserved.sum() == 0
    assert pool.context.sum() == 0


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=30),
    budget=st.integers(1, 400),
    most=st.integers(1, 8),
)
def test_batches_keep_order_and_budget(lengths, budget, most) -> None:
    count = len(lengths)
    requests = Requests(np.zeros(count), np.array(lengths), np.ones(count, dtype=int))
    queue, seen = PrefillQueue(requests, budget, most), []
    for request in range(count):
        queue.add(request)
    while queue.waiting:
        batch, work = queue.take()
        assert 1 <= len(batch) <= most
        assert work.tokens == sum(lengths[r] for r in batch)
        assert work.squares == sum(lengths[r] ** 2 for r in batch)
        assert work.tokens <= budget or len(batch) == 1
        seen += batch
    assert seen == list(range(count))
    assert queue.tokens == 0


def test_a_batch_waits_for_kv_room() -> None:
    requests = Requests(np.zeros(1), np.array([100]), np.array([1]))
    queue = PrefillQueue(requests, 1000, 8)
    queue.add(0)
    assert queue.take(room=99)[0] == []
    assert queue.take(room=100)[0] == [0]
