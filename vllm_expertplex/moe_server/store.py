"""The expert store: loads the routed experts of one MoE server from a checkpoint.

Owns: turning a checkpoint into `ExpertWeights` per layer, whatever the model calls its tensors.
Must not know: transports, scheduling, HTTP.

The names and layouts of expert tensors differ per model, and vLLM's model classes know them. So
the model is built on the meta device, where it costs nothing, with only its `RoutedExperts` layers
real and holding plain weights; its own `load_weights` then fills them from the expert tensors.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.routed_experts import FusedMoeWeightScaleSupported
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.utils import set_weight_attrs
from vllm.utils.torch_utils import set_default_torch_dtype

from vllm_expertplex.executor.loader import is_expert_weight, weights_of
from vllm_expertplex.executor.seam import replaced_routed_experts
from vllm_expertplex.moe_server.backend import ExpertWeights
from vllm_expertplex.quantization import BLOCK, QuantScheme, quant_scheme


class PlacedExperts:
    """Stands in for vLLM's ExpertMapManager with an arbitrary set of local experts."""

    def __init__(self, manager: Any, local_experts: Sequence[int]) -> None:
        self._manager = manager
        self._slot = {expert: slot for slot, expert in enumerate(local_experts)}
        self.local_num_experts = len(local_experts)
        self.expert_map = None
        self.expert_mask = None
        self.routing_tables = None

    def map_global_to_local(self, global_id: int) -> int:
        return self._slot.get(global_id, -1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


class StoredExpertsMethod(FusedMoEMethodBase):
    """Holds weights as the checkpoint has them; computing is a backend's business."""

    is_monolithic = False

    def __init__(self, moe_config: Any, scheme: QuantScheme) -> None:
        super().__init__(moe_config)
        self._scheme = scheme

    def maybe_roundup_sizes(self, hidden: int, intermediate: int, *_: Any) -> tuple[int, int]:
        return hidden, intermediate

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        return None

    def process_weights_after_loading(self, layer: Any) -> None:
        pass

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        fp8 = self._scheme is QuantScheme.FP8_BLOCK
        dtype = torch.float8_e4m3fn if fp8 else params_dtype
        shapes = {  # matrices side by side, and the shape of each
            "w13": (2, intermediate_size_per_partition, hidden_size),
            "w2": (1, hidden_size, intermediate_size_per_partition),
        }
        for name, (matrices, rows, columns) in shapes.items():
            weight = torch.zeros(num_experts, matrices * rows, columns, dtype=dtype)
            self._register(layer, f"{name}_weight", weight, attributes)
            if fp8:
                blocks = (num_experts, matrices * -(-rows // BLOCK), -(-columns // BLOCK))
                scale = torch.ones(blocks, dtype=torch.float32)  # the default is the model's dtype
                block = {"quant_method": FusedMoeWeightScaleSupported.BLOCK.value}
                self._register(layer, f"{name}_weight_scale_inv", scale, attributes | block)

    @staticmethod
    def _register(layer: Any, name: str, tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
        parameter = torch.nn.Parameter(tensor, requires_grad=False)
        layer.register_parameter(name, parameter)
        set_weight_attrs(parameter, attributes)


def load_experts(vllm_config: VllmConfig, local_experts: Sequence[int]) -> dict[str, ExpertWeights]:
    """Load the experts with the given global ids of every MoE layer, in layer order.

    Returns layer name -> weights on vLLM's device. Raises ValueError for a model whose experts
    this server cannot hold, naming the reason, and for a checkpoint that lacks expert tensors.
    """
    scheme = quant_scheme(vllm_config)
    placement: Any = vllm_config.device_config.device
    device = torch.device(placement)
    layers: dict[str, RoutedExperts] = {}

    class ServedExperts(RoutedExperts):  # type: ignore[misc]
        def __init__(
            self,
            layer_name: str,
            params_dtype: torch.dtype,
            moe_config: Any,
            quant_config: Any,
            expert_map_manager: Any,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            placed: Any = PlacedExperts(expert_map_manager, local_experts)
            moe_config.num_local_experts = placed.local_num_experts
            _refuse_unsupported(layer_name, moe_config, kwargs)
            with device:
                super().__init__(
                    layer_name, params_dtype, moe_config, None, placed, *args, **kwargs
                )
            self.filled = 0
            layers[layer_name] = self

        def weight_loader(  # type: ignore[override]
            self,
            param: Any,
            loaded_weight: torch.Tensor,
            weight_name: str,
            shard_id: str,
            expert_id: int,
            return_success: bool = False,
        ) -> bool | None:
            filled = super().weight_loader(
                param, loaded_weight, weight_name, shard_id, expert_id, return_success=True
            )
            self.filled += bool(filled)
            return filled if return_success else None

        def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
            return StoredExpertsMethod(moe_config, scheme)

    with set_current_vllm_config(vllm_config), replaced_routed_experts(ServedExperts):
        model_config: Any = vllm_config.model_config
        with set_default_torch_dtype(model_config.dtype), torch.device("meta"):
            model = initialize_model(vllm_config=vllm_config, model_config=model_config)
        if not layers:
            raise ValueError(
                f"{model_config.model} ({', '.join(model_config.architectures)}) has no routed "
                "experts that vLLM runs through its RoutedExperts layer, so it is not supported; "
                "serve it without --executor expertplex"
            )
        if vllm_config.load_config.load_format == "dummy":
            _draw(layers)
        else:
            _load(model, vllm_config, set(local_experts))
            _check_complete(layers, scheme, len(local_experts), model_config.model)
    return {name: _weights(layer) for name, layer in layers.items()}


def _refuse_unsupported(layer_name: str, moe_config: Any, options: dict[str, Any]) -> None:
    if moe_config.activation != MoEActivation.SILU:
        raise ValueError(
            f"{layer_name}: activation {moe_config.activation.value!r} is not supported by MoE "
            "servers yet, only 'silu'"
        )
    if getattr(moe_config, "has_bias", False):
        raise ValueError(f"{layer_name}: experts with biases are not supported by MoE servers yet")
    if options.get("apply_router_weight_on_input"):
        raise ValueError(
            f"{layer_name}: router weights on the experts' input are not supported by MoE servers"
        )
    if options.get("swiglu_limit") is not None:
        raise ValueError(f"{layer_name}: a swiglu limit is not supported by MoE servers yet")


def _load(model: Any, vllm_config: VllmConfig, local_experts: set[int]) -> None:
    """Feed the model only the expert tensors of this server."""

    def experts_only() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights_of(vllm_config, model, local_experts):
            if is_expert_weight(name):
                yield name, tensor

    model.load_weights(experts_only())


def _draw(layers: dict[str, Any]) -> None:
    """Random weights of the size that trained ones have, instead of a checkpoint's."""
    for layer in layers.values():
        for name in ("w13_weight", "w2_weight"):
            weight, scale = getattr(layer, name).data, getattr(layer, f"{name}_scale_inv", None)
            size = weight.shape[-1] ** -0.5
            if scale is not None:
                scale.data.fill_(size)
                size = 1.0
            for expert in weight:  # one at a time: fp32 values take four times the room
                expert.copy_(torch.randn(expert.shape, device=expert.device) * size)


def _check_complete(layers: dict[str, Any], scheme: QuantScheme, experts: int, model: str) -> None:
    """Gate, up and down of every expert must have come, and their scales if there are any."""
    expected = 3 * experts * (2 if scheme is QuantScheme.FP8_BLOCK else 1)
    for name, layer in layers.items():
        if layer.filled != expected:
            raise ValueError(
                f"{model}: the checkpoint has {layer.filled} of the {expected} expert tensors of "
                f"{name} that belong on this server; is the download complete?"
            )


def _weights(layer: Any) -> ExpertWeights:
    def data(name: str) -> torch.Tensor | None:
        parameter = getattr(layer, name, None)
        return None if parameter is None else parameter.data

    return ExpertWeights(
        layer.w13_weight.data,
        layer.w2_weight.data,
        data("w13_weight_scale_inv"),
        data("w2_weight_scale_inv"),
    )
