"""The routed experts of an engine: vLLM's own layer and kernels, on weights gathered for it.

Owns: the stand-in for vLLM's RoutedExperts layer, and taking its weights out into shards.
Must not know: how weights travel.

A layer is built, loaded and post-processed by vLLM with this engine's experts only, as under expert
parallelism. Then its parameters are taken out, and point into a buffer that holds all experts. The
kernels see a layer that was never split.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.utils.torch_utils import direct_register_custom_op

from vllm_expertplex.asyncep.shards import Layer, Parameter
from vllm_expertplex.moe_server.store import PlacedExperts

Turn = Callable[[int], None]

_begin: Turn | None = None
_end: Turn | None = None


def order_layers(begin: Turn, end: Turn) -> None:
    """Call `begin(i)` before and `end(i)` after the i-th MoE layer of this process is computed."""
    global _begin, _end
    _begin, _end = begin, end


# A traced model must not look inside, and must not move the layer's kernels across: hence custom
# ops that claim to write what the kernels read and wrote. Eager models call the functions.
def _begin_op(x: torch.Tensor, layer: int) -> None:
    if _begin is not None:
        _begin(layer)


def _end_op(x: torch.Tensor, layer: int) -> None:
    if _end is not None:
        _end(layer)


def _fake(x: torch.Tensor, layer: int) -> None:
    pass


direct_register_custom_op("asyncep_begin", _begin_op, mutates_args=["x"], fake_impl=_fake)
direct_register_custom_op("asyncep_end", _end_op, mutates_args=["x"], fake_impl=_fake)


def split_routed_experts(
    local: Sequence[int], layers: list[Any], device: torch.device | None = None
) -> type:
    """A RoutedExperts class that loads the experts `local`; appends each layer it builds.

    `device`: where they are loaded; None is where the model is. From another place vLLM brings one
    layer at a time to the model's device to process it (model_loader/utils.py).
    """

    class SplitRoutedExperts(RoutedExperts):  # type: ignore[misc]
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
            moe_config.num_local_experts = len(local)
            placed: Any = PlacedExperts(expert_map_manager, local)
            with device or contextlib.nullcontext():
                super().__init__(
                    layer_name, params_dtype, moe_config, quant_config, placed, *args, **kwargs
                )
            self.moe_index = len(layers)
            layers.append(self)

        def forward_modular(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return self._in_turn(super().forward_modular, x, *args, **kwargs)

        def forward_monolithic(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return self._in_turn(super().forward_monolithic, x, *args, **kwargs)

        def _in_turn(self, forward: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                torch.ops.vllm.asyncep_begin(x, self.moe_index)
                out = forward(x, *args, **kwargs)
                torch.ops.vllm.asyncep_end(out, self.moe_index)
                return out
            _begin_op(x, self.moe_index)
            out = forward(x, *args, **kwargs)
            _end_op(x, self.moe_index)
            return out

    return SplitRoutedExperts


def describe(layer: Any, local: int) -> Layer:
    """The parameters of a loaded `layer` with one row per expert, of which it has `local`.

    Raises ValueError naming a tensor that cannot be split by expert.
    """
    bias = layer.e_score_correction_bias  # registered here too, but the router's
    found = []
    for name, parameter in sorted(layer.named_parameters(recurse=False)):
        if parameter is bias:
            continue
        if parameter.dim() == 0 or parameter.shape[0] != local or not parameter.is_contiguous():
            raise ValueError(
                f"{layer.layer_name}.{name} has shape {tuple(parameter.shape)}, expected one "
                f"contiguous row for each of {local} experts: this quantisation cannot be served "
                "with --executor asyncep"
            )
        dtype = str(parameter.dtype).removeprefix("torch.")
        found.append(Parameter(name, dtype, tuple(parameter.shape[1:])))
    _refer_to_parameters(layer, local)
    return Layer(layer.layer_name, tuple(found))


def _refer_to_parameters(layer: Any, local: int) -> None:
    """Kernels know scales through a description beside the parameters. Make it hold the parameters
    themselves, which will change; a tensor per expert of its own would not be gathered.
    """
    parameters = {p.data_ptr(): p for p in layer.parameters(recurse=False)}
    config = layer.quant_method.moe_quant_config
    for part in ("_a1", "_a2", "_w1", "_w2"):
        description = getattr(config, part, None)
        for field, value in ({} if description is None else dict(vars(description))).items():
            if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape[0] != local:
                continue
            parameter = parameters.get(value.data_ptr())
            if parameter is not None and parameter.shape == value.shape:
                setattr(description, field, parameter)
            elif local != layer.global_num_experts:
                raise ValueError(
                    f"{layer.layer_name}: {type(layer.quant_method).__name__} keeps {part}.{field} "
                    "per expert outside the layer's parameters; this quantisation cannot be served "
                    "with --executor asyncep"
                )
    if local != layer.global_num_experts:
        kernel = getattr(layer.quant_method, "moe_kernel", None)
        _refuse_own_tensors(layer, getattr(kernel, "fused_experts", None), local)


def _refuse_own_tensors(layer: Any, kernels: Any, local: int) -> None:
    """Kernels may make tensors for the experts that there were when they were made."""
    for name, value in vars(kernels).items() if kernels is not None else ():
        if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == local:
            raise ValueError(
                f"{layer.layer_name}: {type(kernels).__name__} keeps {name} per expert; choose "
                "another --moe-backend, triton for example, with --executor asyncep"
            )
        if name in ("experts", "fallback_experts"):  # kernels that choose between two others
            _refuse_own_tensors(layer, value, local)


def take_out(layer: Any, spec: Layer, into: dict[str, torch.Tensor]) -> None:
    """Copy the layer's rows to `into`, and free its own."""
    for parameter in spec.parameters:
        held = getattr(layer, parameter.name)
        into[parameter.name].copy_(held.data)
        held.data = held.data.new_empty(0)


def put_in(layer: Any, whole: dict[str, torch.Tensor]) -> None:
    """Make the layer compute on `whole`, which has a row for every expert.

    Kernels refer to the parameters, so these stay the same objects.
    """
    for name, tensor in whole.items():
        getattr(layer, name).data = tensor
    experts = layer.global_num_experts
    layer.local_num_experts = layer.moe_config.num_local_experts = experts
    manager = layer.expert_map_manager
    with contextlib.suppress(AttributeError):
        manager.local_num_experts = experts
