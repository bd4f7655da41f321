"""A layer split over engines, packed by vLLM, gathered again: the same numbers as one never split.

vLLM's own layer, loader and CPU kernels, in one process.
"""

from types import SimpleNamespace

import pytest
import torch
from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from vllm_expertplex.asyncep.experts import describe, order_layers, put_in, take_out
from vllm_expertplex.asyncep.memory import HostChannel
from vllm_expertplex.asyncep.shards import ShardLayout
from vllm_expertplex.layout import ExpertMap

EXPERTS, HIDDEN, INTERMEDIATE, TOPK = 5, 64, 96, 2


class _Layer(torch.nn.Module):
    """What the functions under test use of vLLM's RoutedExperts, with its kernel's weights."""

    def __init__(self, w13: torch.Tensor, w2: torch.Tensor) -> None:
        super().__init__()
        self.layer_name = "layer"
        self.global_num_experts = EXPERTS
        self.local_num_experts = w13.shape[0]
        self.moe_config = SimpleNamespace(num_local_experts=w13.shape[0])
        self.expert_map_manager = SimpleNamespace(local_num_experts=w13.shape[0])
        self.quant_method = SimpleNamespace(moe_quant_config=None)
        self.e_score_correction_bias = torch.nn.Parameter(torch.zeros(EXPERTS))
        self.w13_weight = torch.nn.Parameter(w13, requires_grad=False)
        self.w2_weight = torch.nn.Parameter(w2, requires_grad=False)


def _compute(w13: torch.Tensor, w2: torch.Tensor, isa: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, HIDDEN, generator=generator).to(w13.dtype)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOPK] for _ in range(7)])
    weights = torch.rand(7, TOPK, generator=generator)
    out = torch.empty_like(x)
    activation = MoEActivation.SILU.value
    cpu_fused_moe(out, x, w13, w2, None, None, weights, ids.int(), activation, isa)
    return out


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_a_gathered_layer_computes_what_a_whole_one_does(ranks: int) -> None:
    generator = torch.Generator().manual_seed(0)
    w13 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator)
    w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, generator=generator)
    truth = _compute(cpu_prepack_moe_weight(w13, "vec"), cpu_prepack_moe_weight(w2, "vec"), "vec")

    split = ExpertMap.contiguous(EXPERTS, ranks)
    layers, shards = [], []
    for rank in range(ranks):
        mine = split.local_experts(rank)
        packed = [cpu_prepack_moe_weight(w[mine].contiguous(), "vec") for w in (w13, w2)]
        layer = _Layer(*packed)
        spec = describe(layer, len(mine))
        layout = ShardLayout([spec], split)
        shard = torch.zeros(layout.shard_bytes(rank), dtype=torch.uint8)
        take_out(layer, spec, spec.views(shard, len(mine)))
        assert layer.w13_weight.numel() == 0
        layers.append(layer)
        shards.append(shard)
    whole = torch.zeros(layout.whole_bytes(0), dtype=torch.uint8)
    for rank, shard in enumerate(shards):
        HostChannel().copy(layout.copies(rank, 0, shard.numpy(), whole.numpy()))
    parameter = layers[0].w13_weight
    put_in(layers[0], spec.views(whole, EXPERTS))
    assert layers[0].w13_weight is parameter  # kernels may hold it
    assert layers[0].local_num_experts == EXPERTS
    assert torch.equal(_compute(layers[0].w13_weight, layers[0].w2_weight, "vec"), truth)


def test_tensors_that_are_not_per_expert_are_refused_by_name() -> None:
    layer = _Layer(torch.zeros(3, 4, 2), torch.zeros(3, 2, 2))
    layer.w13_scale = torch.nn.Parameter(torch.zeros(7))
    with pytest.raises(ValueError, match=r"layer.w13_scale has shape \(7,\)"):
        describe(layer, 3)


def test_tensors_hidden_beside_the_parameters_are_refused_by_name() -> None:
    layer = _Layer(torch.zeros(3, 4, 2), torch.zeros(3, 2, 2))
    kept = SimpleNamespace(scale=torch.zeros(3))
    layer.quant_method.moe_quant_config = SimpleNamespace(_w1=kept, _w2=None)
    with pytest.raises(ValueError, match=r"_w1\.scale per expert outside the layer's parameters"):
        describe(layer, 3)


def test_kernels_with_tensors_of_their_own_are_refused_by_name() -> None:
    layer = _Layer(torch.zeros(3, 4, 2), torch.zeros(3, 2, 2))
    inner = SimpleNamespace(ab_strides=torch.zeros(3))
    kernels = SimpleNamespace(experts=inner, fallback_experts=SimpleNamespace())
    layer.quant_method.moe_kernel = SimpleNamespace(fused_experts=kernels)
    with pytest.raises(ValueError, match=r"keeps ab_strides per expert; .* --moe-backend"):
        describe(layer, 3)


def test_kernels_are_shown_the_parameters_that_will_change() -> None:
    layer = _Layer(torch.zeros(3, 4, 2), torch.zeros(3, 2, 2))
    description = SimpleNamespace(scale=layer.w2_weight.data)
    layer.quant_method.moe_quant_config = SimpleNamespace(_w1=None, _w2=description)
    describe(layer, 3)
    assert description.scale is layer.w2_weight


def test_a_traced_model_keeps_the_turns_of_its_layers() -> None:
    seen: list[str] = []
    order_layers(lambda i: seen.append(f"begin {i}"), lambda i: seen.append(f"end {i}"))
    weight = torch.ones(4)

    def model(x: torch.Tensor) -> torch.Tensor:
        for layer in range(2):
            torch.ops.vllm.asyncep_begin(x, layer)
            y = x * weight
            torch.ops.vllm.asyncep_end(y, layer)
            x = y + 1
        return x

    try:
        x = torch.zeros(4)
        assert torch.equal(torch.compile(model, backend="aot_eager")(x), torch.full((4,), 2.0))
    finally:
        order_layers(lambda i: None, lambda i: None)
    assert seen == ["begin 0", "end 0", "begin 1", "end 1"]
