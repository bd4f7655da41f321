"""What a deployment computes on CPU against vLLM's own fused kernel, bit for bit."""

import threading
from pathlib import Path

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm_expertplex._comm import MoeEndpoint

from vllm_expertplex.comm.shm import (
    AttentionPeer,
    Board,
    Shape,
    Slot,
    SlotTensors,
    board_path,
    slot_path,
)
from vllm_expertplex.layout import (
    DECODE,
    PHASE_DECODE,
    PHASE_PREFILL,
    ExpertMap,
    Layout,
    Server,
    SlotOwner,
)
from vllm_expertplex.moe_server.backend import ExpertWeights, Operation
from vllm_expertplex.moe_server.backend_tiles import TileOptions, TilesBackend

HIDDEN, INTERMEDIATE, EXPERTS, TOPK, TOKENS = 256, 128, 16, 4, 300
ME = SlotOwner(Server(DECODE, 0))

pytestmark = pytest.mark.skipif(
    not (current_platform.is_cpu() and torch.cpu._is_avx512_bf16_supported()),
    reason="vLLM's fused kernel is compared where it has AVX-512 with bf16",
)
# bf16 products are the same ones only where both are AMX's.
AMX = torch.cpu._is_amx_tile_supported()
KERNELS = [(torch.float32, "vec"), (torch.float16, "vec")] + [(torch.bfloat16, "amx")] * AMX


def routed(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(TOKENS, EXPERTS, generator=generator)
    weights, ids = scores.topk(TOPK, sorted=False)
    return (weights / weights.sum(-1, keepdim=True)).contiguous(), ids.int().contiguous()


@pytest.mark.parametrize(("dtype", "isa"), KERNELS, ids=str)
@pytest.mark.parametrize("servers", [1, 3])
def test_sums_equal_vllms_fused_kernel(
    tmp_path: Path, dtype: torch.dtype, isa: str, servers: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    w13 = (torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator) * 0.1).to(dtype)
    w2 = (torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=generator) * 0.1).to(dtype)
    packed = [ops.cpu_prepack_moe_weight(w.clone(), isa) for w in (w13, w2)]
    experts = ExpertMap.contiguous(EXPERTS, servers)
    deployment = Deployment(tmp_path, experts, servers, w13, w2)
    try:
        for n, phase in ((1, PHASE_DECODE), (32, PHASE_DECODE), (TOKENS, PHASE_PREFILL)):
            x = torch.randn(n, HIDDEN, generator=generator).to(dtype)
            weights, ids = (routing[:n] for routing in routed(n))
            expected = torch.empty_like(x)
            ops.cpu_fused_moe(expected, x, *packed, None, None, weights, ids, "silu", isa)
            assert torch.equal(deployment.compute(x, weights, ids, phase), expected)
    finally:
        deployment.close()


class Deployment:
    """One attention server and the MoE servers' backends, over real slots, in this process."""

    def __init__(
        self, run_dir: Path, experts: ExpertMap, servers: int, w13: torch.Tensor, w2: torch.Tensor
    ) -> None:
        layout, dtype = Layout(1, 1, servers), w13.dtype
        shape = Shape(TOKENS, HIDDEN, TOPK, dtype.itemsize)
        self._endpoints, self._slots, self._backends = [], [], []
        for moe in layout.moe_servers:
            Board(board_path(run_dir, moe), create=True)
            Slot(slot_path(run_dir, ME, moe), shape, create=True)
            paths = [slot_path(run_dir, ME, moe)], [shape], board_path(run_dir, moe)
            self._endpoints.append(MoeEndpoint(*paths, 0))
            self._slots.append(SlotTensors.of(self._endpoints[-1], 0, shape, dtype))
            local = experts.local_experts(moe.rank)
            layer = ExpertWeights(w13[local].clone(), w2[local].clone())
            self._backends.append(TilesBackend([layer], TileOptions(workers=1), dtype))
        self._peer = AttentionPeer(run_dir, ME, layout, shape, experts, 0, 30.0)

    def compute(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, phase: int
    ) -> torch.Tensor:
        self._peer.dispatch(x, weights, ids, 0, phase)
        for endpoint, slot, backend in zip(
            self._endpoints, self._slots, self._backends, strict=True
        ):
            for ready in endpoint.wait(0):
                done, n = threading.Event(), ready.tokens
                buffers = slot.x[:n], slot.topk_ids[:n], slot.out[:n]
                backend.submit([Operation(0, phase, 0, *buffers, done.set)])
                assert done.wait(30)
                endpoint.complete(ready, 0)
        return self._peer.combine(x.shape[0], x.dtype)

    def close(self) -> None:
        for backend in self._backends:
            backend.close()
