"""Dispatch and combine over real shared memory, between threads and between processes."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm_expertplex._comm import AttentionEndpoint, MoeEndpoint

from vllm_expertplex.comm.shm import (
    AttentionPeer,
    Board,
    MoeServerLost,
    Shape,
    Slot,
    SlotTensors,
    board_path,
    slot_path,
)
from vllm_expertplex.layout import DECODE, MOE, ExpertMap, Layout, Server, SlotOwner

ME = SlotOwner(Server(DECODE, 0))


class Deployment:
    """The files of a run with one attention server, and both ends on them."""

    def __init__(self, run_dir: Path, shape: Shape, placement: list[int], servers: int) -> None:
        self.run_dir, self.shape = run_dir, shape
        self.layout = Layout(1, 1, servers)
        slots: list[int] = []
        for expert, server in enumerate(placement):
            slots.append(placement[:expert].count(server))
        self.experts = ExpertMap(placement, slots)
        self.boards = [Board(board_path(run_dir, m), create=True) for m in self.layout.moe_servers]
        self.slots = [
            Slot(slot_path(run_dir, ME, m), shape, create=True) for m in self.layout.moe_servers
        ]

    def peer(self, timeout_s: float = 20.0, spin_us: int = 0) -> AttentionPeer:
        return AttentionPeer(
            self.run_dir, ME, self.layout, self.shape, self.experts, spin_us, timeout_s
        )

    def endpoint(self, rank: int) -> MoeEndpoint:
        moe = Server(MOE, rank)
        return MoeEndpoint(
            [slot_path(self.run_dir, ME, moe)], [self.shape], board_path(self.run_dir, moe), 0
        )

    @contextmanager
    def serving(self, scale: torch.Tensor) -> Iterator[None]:
        """A thread per MoE server; expert e multiplies by `scale[e]`."""
        threads = [
            threading.Thread(
                target=serve, args=(self.endpoint(r), self.shape, self.scales(scale, r))
            )
            for r in range(self.layout.moe)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            for board in self.boards:
                board.stop()
            for thread in threads:
                thread.join(10)

    def scales(self, scale: torch.Tensor, rank: int) -> torch.Tensor:
        return scale[self.experts.local_experts(rank)]


def serve(endpoint: MoeEndpoint, shape: Shape, scale: torch.Tensor) -> None:
    """A MoE server whose expert at slot s multiplies a row by `scale[s]`."""
    slot = SlotTensors.of(endpoint, 0, shape, torch.float32)
    while not endpoint.stopping:
        for operation in endpoint.wait(1_000_000_000):
            n = operation.tokens
            ids = slot.topk_ids[:n].long()
            # What is not a row of this operation is nobody's: it must not reach the sum.
            slot.out.fill_(float("nan"))
            token, k = (ids >= 0).nonzero(as_tuple=True)
            slot.out[token, k] = slot.x[token] * scale[ids[token, k], None]
            endpoint.complete(operation, 0)


def reference(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    factors = torch.where(ids >= 0, scale[ids.clamp_min(0).long()], torch.zeros(()))
    return x.double() * (factors.double() * weights.double()).sum(1, keepdim=True)


@st.composite
def placements(draw: st.DrawFn) -> tuple[list[int], int]:
    """Experts on servers in any way, servers without any expert included."""
    servers = draw(st.integers(1, 4))
    experts = draw(st.integers(1, 9))
    return [draw(st.integers(0, servers - 1)) for _ in range(experts)], servers


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(placed=placements(), topk=st.integers(1, 5), seed=st.integers(0, 2**31), data=st.data())
def test_sums_equal_a_float64_reference(
    tmp_path_factory: pytest.TempPathFactory,
    placed: tuple[list[int], int],
    topk: int,
    seed: int,
    data: st.DataObject,
) -> None:
    placement, servers = placed
    generator = torch.Generator().manual_seed(seed)
    shape = Shape(8, 16, topk, 4)
    deployment = Deployment(tmp_path_factory.mktemp("run"), shape, placement, servers)
    scale = torch.randn(len(placement), generator=generator)
    peer = deployment.peer()
    with deployment.serving(scale):
        # Several operations on the same buffers, of sizes that leave old rows behind.
        for layer, n in enumerate(data.draw(st.lists(st.integers(0, 8), min_size=1, max_size=5))):
            x = torch.randn(n, 16, generator=generator)
            low, high = data.draw(st.sampled_from([(-1, len(placement)), (-1, 0), (0, 1)]))
            ids = torch.randint(low, high, (n, topk), generator=generator, dtype=torch.int32)
            weights = torch.rand(n, topk, generator=generator)
            peer.dispatch(x, weights, ids, layer, layer % 2)
            found = peer.combine(n, torch.float32)
            torch.testing.assert_close(
                found.double(), reference(x, ids, weights, scale), rtol=1e-6, atol=1e-6
            )


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(placed=placements(), topk=st.integers(1, 6), seed=st.integers(0, 2**31))
def test_sums_do_not_depend_on_where_experts_live(
    tmp_path_factory: pytest.TempPathFactory,
    placed: tuple[list[int], int],
    topk: int,
    seed: int,
) -> None:
    """Bit for bit: over several servers as on one."""
    placement, servers = placed
    generator = torch.Generator().manual_seed(seed)
    shape = Shape(8, 16, topk, 4)
    scale = torch.randn(len(placement), generator=generator)
    x = torch.randn(8, 16, generator=generator)
    ids = torch.randint(-1, len(placement), (8, topk), generator=generator, dtype=torch.int32)
    weights = torch.rand(8, topk, generator=generator)
    sums = []
    for where, count in ((placement, servers), ([0] * len(placement), 1)):
        deployment = Deployment(tmp_path_factory.mktemp("run"), shape, where, count)
        peer = deployment.peer()
        with deployment.serving(scale):
            peer.dispatch(x, weights, ids, 0, 0)
            sums.append(peer.combine(8, torch.float32))
    assert torch.equal(*sums)


def test_sums_add_in_the_order_of_k_and_round_once_each(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, Shape(1, 8, 3, 4), [1, 0, 1], 2)
    peer = deployment.peer()
    near = 1 + 2.0**-12  # its square needs 25 bits
    with deployment.serving(torch.tensor([2.0**-24, near, 1.0])):
        ids = torch.tensor([[2, 0, 0], [1, 2, 0]], dtype=torch.int32)
        peer.dispatch(torch.ones(1, 8), torch.ones(1, 3), ids[:1], 0, 0)
        # 1 + 2^-24 is 1 again, twice; the two small ones added first would show.
        assert torch.equal(peer.combine(1, torch.float32), torch.ones(1, 8))
        peer.dispatch(torch.ones(1, 8), torch.tensor([[1.0, -1.0, 0.0]]), ids[1:], 0, 0)
        assert torch.equal(peer.combine(1, torch.float32), torch.full((1, 8), near - 1))
        # A product is not rounded before it is added: near^2 - (1 + 2^-11) is 2^-24.
        ids = torch.tensor([[2, 1, 2]], dtype=torch.int32)
        peer.dispatch(torch.ones(1, 8), torch.tensor([[-1 - 2.0**-11, near, 0.0]]), ids, 0, 0)
        assert torch.equal(peer.combine(1, torch.float32), torch.full((1, 8), 2.0**-24))


def test_result_is_the_callers_own_and_rounded_once(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, Shape(4, 8, 2, 4), [0, 1], 2)
    scale = torch.tensor([1.0, 2**-9])  # lost if a partial sum were rounded to bf16
    x, ids = torch.ones(4, 8), torch.tensor([[0, 1]] * 4, dtype=torch.int32)
    peer = deployment.peer()
    with deployment.serving(scale):
        peer.dispatch(x, torch.tensor([[1.0, 3.0]] * 4), ids, 0, 0)
        first = peer.combine(4, torch.bfloat16)
        kept = first.clone()
        peer.dispatch(x * 5, torch.ones(4, 2), ids, 0, 0)
        second = peer.combine(4, torch.float32)
        third_input = second.clone()
        peer.dispatch(x, torch.ones(4, 2), ids, 0, 0)
        peer.combine(4, torch.float32)
    assert torch.equal(first, kept)
    assert torch.equal(second, third_input)
    assert first[0, 0] == torch.tensor(1 + 3 * 2**-9).to(torch.bfloat16)


def test_servers_without_rows_are_neither_woken_nor_waited_for(tmp_path: Path) -> None:
    """Nobody serves moe-1: an operation that has nothing for it completes all the same."""
    deployment = Deployment(tmp_path, Shape(4, 8, 1, 4), [0, 1], 2)
    server = deployment.endpoint(0)
    peer = deployment.peer(timeout_s=5)
    thread = threading.Thread(target=serve, args=(server, deployment.shape, torch.tensor([2.0])))
    thread.start()
    ids = torch.zeros(3, 1, dtype=torch.int32)
    peer.dispatch(torch.ones(3, 8), torch.ones(3, 1), ids, 0, 0)
    assert torch.equal(peer.combine(3, torch.float32), torch.full((3, 8), 2.0))
    deployment.boards[0].stop()
    thread.join(10)
    # And an operation without any row needs no server at all.
    peer.dispatch(torch.ones(3, 8), torch.ones(3, 1), ids - 1, 0, 0)
    assert not peer.combine(3, torch.float32).any()
    assert deployment.endpoint(1).wait(0) == []


def test_more_tokens_than_the_slots_hold_are_refused_before_sending(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, Shape(4, 8, 1, 4), [0], 1)
    peer = deployment.peer()
    with pytest.raises(ValueError, match=r"5 tokens in one step, but the slots hold 4"):
        peer.dispatch(torch.ones(5, 8), torch.ones(5, 1), torch.zeros(5, 1), 0, 0)
    assert deployment.endpoint(0).wait(0) == []
    with deployment.serving(torch.tensor([1.0])):  # it is still usable, up to the limit
        peer.dispatch(torch.ones(4, 8), torch.ones(4, 1), torch.zeros(4, 1), 0, 0)
        assert peer.combine(4, torch.float32).sum() == 32


def test_an_expert_that_does_not_exist_is_refused_before_sending(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, Shape(4, 8, 1, 4), [0, 0], 1)
    peer = deployment.peer()
    with pytest.raises(IndexError, match="expert 2 of 2"):
        peer.dispatch(torch.ones(1, 8), torch.ones(1, 1), torch.tensor([[2]]), 0, 0)
    assert deployment.endpoint(0).wait(0) == []


@pytest.mark.parametrize(
    ("x", "ids", "weights", "found"),
    [
        (torch.ones(2, 9), torch.zeros(2, 2), torch.zeros(2, 2), r"\[2, 9\].*\(2, 8\)"),
        (torch.ones(2, 8).bfloat16(), torch.zeros(2, 2), torch.zeros(2, 2), r"\]\), 2, .*\), 4, "),
        (torch.ones(2, 8), torch.zeros(2, 3), torch.zeros(2, 2), r"\[2, 3\].*\(2, 2\)"),
        (torch.ones(2, 8), torch.zeros(1, 2), torch.zeros(2, 2), r"\[1, 2\].*\(2, 2\)"),
        (torch.ones(2, 8), torch.zeros(2, 2), torch.zeros(2, 1), r"\[2, 1\].*\(2, 2\)"),
    ],
)
def test_tensors_of_another_shape_are_refused_with_both(
    tmp_path: Path, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, found: str
) -> None:
    peer = Deployment(tmp_path, Shape(4, 8, 2, 4), [0], 1).peer()
    with pytest.raises(ValueError, match=found):
        peer.dispatch(x, weights, ids, 0, 0)


def test_a_missed_deadline_names_the_server_and_ends_the_endpoint(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, Shape(4, 8, 1, 4), [0, 1], 2)
    peer = deployment.peer(timeout_s=0.2)
    peer.layer_names = ["model.layers.0.mlp", "model.layers.1.mlp"]
    ones, ids = torch.ones(1, 1), torch.ones(1, 1, dtype=torch.int32)
    peer.dispatch(torch.ones(1, 8), ones, ids, 1, 0)
    begin = time.monotonic()
    with pytest.raises(MoeServerLost, match=r"decode-0: moe-1 .*layers\.1\.mlp for 1 .*0\.2 s"):
        peer.combine(1, torch.float32)
    assert 0.2 <= time.monotonic() - begin < 5
    # The server is only late: what it does now must not reach a later operation.
    endpoint = deployment.endpoint(1)
    (late,) = endpoint.wait(0)
    endpoint.complete(late, 0)
    with pytest.raises(RuntimeError, match="moe-1 did not finish an earlier operation"):
        peer.dispatch(torch.ones(1, 8), ones, ids, 1, 0)


def test_a_lost_server_wakes_who_waits_for_it(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, Shape(4, 8, 1, 4), [0, 1], 2)
    peer = deployment.peer(timeout_s=60)
    ids = torch.ones(1, 1, dtype=torch.int32)
    peer.dispatch(torch.ones(1, 8), torch.ones(1, 1), ids, 0, 0)
    timer = threading.Timer(0.2, deployment.slots[1].fail)
    timer.start()
    begin = time.monotonic()
    with pytest.raises(MoeServerLost, match="moe-1"):
        peer.combine(1, torch.float32)
    assert time.monotonic() - begin < 10
    timer.join()


def test_order_of_calls_is_enforced(tmp_path: Path) -> None:
    peer = Deployment(tmp_path, Shape(4, 8, 1, 4), [0], 1).peer()
    with pytest.raises(RuntimeError, match="combine without dispatch"):
        peer.combine(1, torch.float32)
    arguments = (torch.ones(1, 8), torch.ones(1, 1), torch.zeros(1, 1), 0, 0)
    peer.dispatch(*arguments)
    with pytest.raises(RuntimeError, match="dispatch before combine"):
        peer.dispatch(*arguments)


def test_a_server_that_never_ran_has_no_heartbeat(tmp_path: Path) -> None:
    board = Board(str(tmp_path / "board"), create=True)
    assert board.heartbeat_age_s() == -1


# -- files ---------------------------------------------------------------------------------------


def test_files_are_the_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Deployment(tmp_path, Shape(4, 8, 1, 4), [0, 1], 2)
    finally:
        os.umask(before)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 4
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (Shape(4, 8, 2, 4), r"topk=1 .*expected .*topk=2 "),
        (Shape(5, 8, 1, 4), r"max_tokens=4 .*expected .*max_tokens=5 "),
        (Shape(4, 16, 1, 2), r"hidden=8 .*expected .*hidden=16 "),
        (Shape(4096, 8, 1, 4), r"found \d+ bytes .*expected \d+ bytes"),
    ],
)
def test_a_slot_of_another_shape_is_refused_with_both(
    tmp_path: Path, shape: Shape, message: str
) -> None:
    path = str(tmp_path / "slot")
    Slot(path, Shape(4, 8, 1, 4), create=True)
    with pytest.raises(RuntimeError, match=message):
        Slot(path, shape, create=False)


def test_files_are_never_reused_or_followed(tmp_path: Path) -> None:
    path, link = tmp_path / "board", tmp_path / "link"
    with pytest.raises(RuntimeError, match="No such file"):
        Board(str(path), create=False)
    Board(str(path), create=True)
    with pytest.raises(RuntimeError, match="File exists"):
        Board(str(path), create=True)
    link.symlink_to(path)
    with pytest.raises(RuntimeError, match="cannot open"):
        Board(str(link), create=False)
    (tmp_path / "page").write_bytes(bytes(4096))
    with pytest.raises(RuntimeError, match="not the board"):
        Board(str(tmp_path / "page"), create=False)


def test_memory_that_is_not_there_is_refused_at_creation(tmp_path: Path) -> None:
    path = Path("/dev/shm") / f"expertplextest-{os.getpid()}"
    with pytest.raises(RuntimeError, match=r"reserve memory .* --shm-size"):
        Slot(str(path), Shape(2**31, 2**14, 1, 4), create=True)
    assert not path.exists()


def test_placement_on_a_server_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    Deployment(tmp_path, Shape(4, 8, 1, 4), [0], 1)
    moe = Server(MOE, 0)
    paths = [slot_path(tmp_path, ME, moe)], [board_path(tmp_path, moe)]
    with pytest.raises(ValueError, match="MoE server 1 of 1"):
        AttentionEndpoint(*paths, Shape(4, 8, 1, 4), [0, 1], [0, 0], 0)


# -- two processes -------------------------------------------------------------------------------


def serve_in_process(run_dir: Path, report: "multiprocessing.connection.Connection") -> None:
    deployment_shape = Shape(4, 8, 1, 4)
    moe = Server(MOE, 0)
    endpoint = MoeEndpoint(
        [slot_path(run_dir, ME, moe)], [deployment_shape], board_path(run_dir, moe), 0
    )
    # Idle first: how much processor time does a second of waiting take?
    torch.set_num_threads(1)
    begin = time.process_time()
    assert endpoint.wait(1_000_000_000) == []
    report.send(time.process_time() - begin)
    serve(endpoint, deployment_shape, torch.tensor([3.0]))


@pytest.fixture
def process(tmp_path: Path) -> Iterator[tuple[Deployment, Callable[[], float]]]:
    """A deployment whose MoE server is another process, and what waiting for a second cost it."""
    deployment = Deployment(tmp_path, Shape(4, 8, 1, 4), [0], 1)
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(
        target=serve_in_process, args=(tmp_path, there)
    )
    child.start()
    yield deployment, lambda: here.recv() if here.poll(60) else float("inf")
    deployment.boards[0].stop()
    child.join(20)
    if child.exitcode is None:
        child.kill()
    assert child.exitcode == 0, "a MoE server ends when its board says so"


def test_another_process_serves_sleeps_and_shows_life(
    process: tuple[Deployment, Callable[[], float]],
) -> None:
    deployment, idle_cost = process
    assert idle_cost() < 0.02  # of one second
    assert 0 <= deployment.boards[0].heartbeat_age_s() < 30
    peer = deployment.peer()
    for step in range(50):
        x = torch.full((4, 8), float(step))
        ids = torch.zeros(4, 1, dtype=torch.int32)
        peer.dispatch(x, torch.ones(4, 1), ids, 0, step % 2)
        assert torch.equal(peer.combine(4, torch.float32), x * 3)
    for phase in (0, 1):
        counters = deployment.boards[0].counters(phase)
        assert counters["operations"] == 25
        assert counters["tokens"] == 100
    mine = deployment.slots[0].counters()
    assert (mine["operations"], mine["tokens_sent"]) == (50, 200)
    assert mine["wait_ns"] > 0
