"""Dispatch, WaitDone and combine between two processes, on one GPU or two, byte for byte.

The MoE side is `echo/echo.cu`: what comes back depends on every byte that was sent.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vllm_expertplex.comm.peer import SlotLayout
from vllm_expertplex.comm.peer_transport import PeerTransport
from vllm_expertplex.comm.shm import MoeServerLost
from vllm_expertplex.layout import PHASE_DECODE, PHASE_PREFILL, ExpertMap, Layout, Server, SlotOwner

sys.path.insert(0, str(Path(__file__).parent / "echo"))
from harness import EchoServers

pytestmark = pytest.mark.gpu

EXPERTS, HIDDEN, TOPK, TOKENS, LAYERS = 16, 1664, 4, 3000, 62
ME = Server("prefill", 0)


class Pair:
    """An attention server in this process and its echoing MoE servers."""

    def __init__(self, run_dir: Path, servers: int, fp8: bool, timeout_s: float) -> None:
        layout = Layout.parse(f"1P1D{servers}E")
        self.fp8, self.experts = fp8, ExpertMap.contiguous(EXPERTS, servers)
        slot = SlotLayout(TOKENS, HIDDEN, TOPK, fp8)
        self.echo = EchoServers(
            run_dir, str(layout), [slot, slot], device=torch.cuda.device_count() - 1
        )
        try:
            torch.cuda.set_device(0)
            ends = [
                PeerTransport(run_dir, SlotOwner(me), layout, slot, self.experts, timeout_s)
                for me in layout.attention_servers
            ]
            self.transport, self._other = ends
            self.transport.connect(60)
            self.echo.await_start()
        except BaseException:
            self.echo.__exit__()
            raise

    def run(self, x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor, layer: int, phase: int):
        self.transport.dispatch(x, w, ids, layer, phase)
        return self.transport.combine(len(x), torch.bfloat16)

    def expected(self, x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor, add: float):
        """What the echo servers' partial sums add up to, in the kernels' own order of rounding."""
        v = x.float()
        if self.fp8:
            blocks = v.view(len(x), -1, 128)
            largest = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-10)
            most = torch.full_like(largest, 448.0)  # torch multiplies by a scalar's reciprocal
            quantised = (blocks * (most / largest)).to(torch.float8_e4m3fn).float()
            v = (quantised * (largest / most)).view(x.shape)
        table = torch.tensor([self.experts.server, self.experts.slot], device="cuda")
        server = torch.where(ids >= 0, table[0][ids.long()], -1)
        slot = table[1][ids.long()]
        total = torch.zeros_like(v)
        for z in range(max(self.experts.server) + 1):
            here = server == z
            factor = torch.zeros(len(x), device="cuda")
            for k in range(TOPK):
                factor = torch.where(here[:, k], factor + w[:, k] * (slot[:, k] + 1), factor)
            part = (v * factor[:, None] + add).bfloat16().float()
            total = torch.where(here.any(1)[:, None], total + part, total)
        return total.bfloat16()


@pytest.fixture(scope="module", params=["bf16-1E", "fp8-1E", "fp8-2E"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    kind, servers = request.param.split("-")
    made = Pair(tmp_path_factory.mktemp("run"), int(servers[0]), kind == "fp8", timeout_s=20)
    with made.echo:
        yield made


def operands(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random rows of very different sizes, weights, and distinct experts, a quarter of them -1."""
    x = (
        torch.randn(tokens, HIDDEN, device="cuda")
        * torch.rand(tokens, 1, device="cuda").exp2() ** 8
    )
    ids = torch.rand(tokens, EXPERTS, device="cuda").argsort(1)[:, :TOPK].int()
    ids = torch.where(torch.rand(ids.shape, device="cuda") < 0.25, -1, ids)
    return x.bfloat16(), torch.rand(tokens, TOPK, device="cuda"), ids


def test_every_byte_arrives_and_comes_back(pair: Pair) -> None:
    for n, tokens in enumerate([1, 7, 64, 300, TOKENS, TOKENS, 2, 64]):
        x, w, ids = operands(tokens)
        phase = n % 2
        out = pair.run(x, w, ids, n, phase)
        assert torch.equal(out, pair.expected(x, w, ids, n + phase / 2))
    x, w, ids = operands(8)
    nowhere = torch.full_like(ids, -1)
    assert torch.equal(pair.run(x, w, nowhere, 0, 0), torch.zeros_like(x))
    pair.transport.check()


def test_a_captured_step_of_many_layers_replays(pair: Pair) -> None:
    inputs = [operands(32) for _ in range(LAYERS)]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        pair.run(*inputs[0], 0, PHASE_DECODE)  # loads the kernels
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        outputs = [pair.run(*inputs[n], n, PHASE_DECODE) for n in range(LAYERS)]
    for _ in range(20):
        for old, new in zip(inputs, (operands(32) for _ in range(LAYERS)), strict=True):
            for a, b in zip(old, new, strict=True):
                a.copy_(b)
        for out in outputs:
            out.fill_(float("nan"))
        graph.replay()
        for n in range(LAYERS):
            assert torch.equal(outputs[n], pair.expected(*inputs[n], n)), f"layer {n}"
    # Eager prefill between replays goes on with the same sequence numbers.
    x, w, ids = operands(TOKENS)
    assert torch.equal(pair.run(x, w, ids, 3, PHASE_PREFILL), pair.expected(x, w, ids, 3.5))
    pair.transport.check()


def test_a_server_that_stops_is_named_within_its_deadline(tmp_path: Path) -> None:
    pair = Pair(tmp_path, 2, True, timeout_s=0.5)
    with pair.echo:
        x, w, ids = operands(16)
        pair.run(x, w, ids, 0, PHASE_DECODE)
        torch.cuda.synchronize()
        pair.transport.check()
        pair.echo.stop()
        begin = time.monotonic()
        for layer in range(1, 20):
            pair.run(x, w, ids, layer, PHASE_DECODE)
        torch.cuda.synchronize()
        assert time.monotonic() - begin < 3, "every layer waited its own deadline"
        with pytest.raises(MoeServerLost, match="moe-0, moe-1 did not finish layer 1 for 16 tok"):
            pair.transport.check()
